"""From a specification to a plan: groups, planes, tables, bytes. Never imports torch."""
