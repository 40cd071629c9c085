"""Flags made from the settings, so that a setting is described in one place only."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from chatd.settings import Settings, load_settings


def add_settings(parser: argparse.ArgumentParser, names: Iterable[str] | None = None) -> None:
    """Adds --config and a flag for each named setting (all, unless named)."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with settings (default: chatd.toml in the data folder)"
    )
    for name in names if names is not None else Settings.model_fields:
        _add_flag(parser, name, Settings.model_fields[name])


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Raises SettingsError."""
    flags = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    return load_settings(flags, arguments.config)


def flags_of(settings: Settings, names: Iterable[str]) -> list[str]:
    """Flags that give another process these settings; those that are not set are left out."""
    flags: list[str] = []
    for name in names:
        flag, value = "--" + name.replace("_", "-"), getattr(settings, name)
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple):
            flags += [f"{flag}={item.name}={item.path}" for item in value]
        elif value is not None:
            flags.append(f"{flag}={value}")
    return flags


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    flag = "--" + name.replace("_", "-")
    text = f"{field.description} (default: {_default_text(field)})".replace("%", "%%")
    if field.annotation is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    if isinstance(extra := field.json_schema_extra, dict) and extra.get("repeatable"):
        parser.add_argument(flag, action="append", default=None, metavar="NAME=FOLDER", help=text)
        return
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
    parser.add_argument(flag, default=None, choices=choices, metavar=None if choices else name.upper(), help=text)


def _default_text(field: FieldInfo) -> str:
    extra: Any = field.json_schema_extra
    if isinstance(extra, dict) and "default_text" in extra:
        return str(extra["default_text"])
    if field.default is PydanticUndefined or field.default is None:
        return "none"
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
