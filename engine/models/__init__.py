"""Model classes. They know nothing of low precision; :func:`engine.models.registry.build_model` picks one."""
