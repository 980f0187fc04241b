"""kvfactory: one declarative factory that composes a model's whole cache."""
