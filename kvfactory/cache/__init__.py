"""The cache: books, pools and attention behind one front."""

from kvfactory.cache.cache import Cache

__all__ = ["Cache"]
