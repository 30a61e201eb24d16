"""Calls on another backend than that of the settings."""

from dataclasses import replace

from fp8moe.runtime import config


def on_reference(call, *arguments, **options):
    """What ``call(*arguments, **options)`` returns on the reference backend."""
    settings = config.settings
    config.settings = replace(settings, backend="reference")
    try:
        return call(*arguments, **options)
    finally:
        config.settings = settings
