"""The reload of a changed configuration while the daemon runs.

The settings marked with a `LiveEffect` in their sections take effect at once.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cachefs.errors import ConfigError
from cachefs.messages import LogLevel, ReloadResult, SettingChange
from cachefs_daemon.config import Config, InvalidConfig, live_effects
from cachefs_daemon.node import Node
from cachefs_daemon.runtime import logs
from cachefs_daemon.section import LiveEffect, Section
from cachefs_daemon.store_settings import store_config

log = logging.getLogger(__name__)

ApplySetting = Callable[[Node, Config], None]
_NONE: Final = "none"


def _apply_tier_sizes(node: Node, config: Config) -> None:
    """Resize the tiers. Raises ConfigError, with nothing changed, where a tier cannot have that size."""
    node.storage.resize(store_config(config))


def _apply_logging(_: Node, config: Config) -> None:
    logs.set_up_logging(config.daemon.log_level, config.daemon.log_format)


# Functions that may raise come first.
_APPLY: Final[Mapping[LiveEffect, ApplySetting]] = {
    LiveEffect.TIER_SIZES: _apply_tier_sizes,
    LiveEffect.LOGGING: _apply_logging,
}


@dataclass(frozen=True, slots=True)
class _SettingChange:
    """A setting with another value than before."""

    key: str
    before: object
    now: object

    @property
    def to_message(self) -> SettingChange:
        return SettingChange(key=self.key, before=_text(self.before), now=_text(self.now))


class LiveSettings:
    """Reloads the configuration. Used on the event loop only."""

    def __init__(self, node: Node, read: Callable[[], Config]) -> None:
        """read: loads the configuration file; raises InvalidConfig."""
        self._node = node
        self._read = read

    def reload(self) -> ReloadResult:
        """Apply the changed settings that have a live effect. Raises ConfigError, with nothing changed, where the file
        is wrong."""
        try:
            fresh = self._read()
        except InvalidConfig as error:
            raise ConfigError(f"the configuration stays as it was: {error}") from None
        found = list(find_changes(self._node.config, fresh))
        effects = live_effects(type(fresh))
        live = [change for change in found if change.key in effects]
        merged = _with_changes(self._node.config, live)
        changed = {effects[change.key] for change in live}
        for effect, apply in _APPLY.items():
            if effect in changed:
                apply(self._node, merged)
        self._node.use_config(merged)
        result = ReloadResult(
            applied=[change.to_message for change in live],
            restart=[change.to_message for change in found if change.key not in effects],
        )
        for one in result.applied:
            log.info("%s is %s now, and was %s", one.key, one.now, one.before)
        for one in result.restart:
            log.warning("%s = %s takes effect at the next start; it is still %s", one.key, one.now, one.before)
        if not found:
            log.info("the configuration was read again; nothing has changed")
        return result

    def reload_or_log(self) -> None:
        """Call `reload`, and log an error instead of raising it."""
        try:
            self.reload()
        except ConfigError as error:
            log.error("%s", error)

    def log_level(self, request: LogLevel) -> LogLevel:
        """Set the log level until the next reload or restart, if the request names one. Return the level. Raises
        ConfigError."""
        if request.level:
            if request.level not in logs.LEVELS:
                raise ConfigError(f"log level {request.level!r}: expected one of {', '.join(logs.LEVELS)}")
            logs.set_level(request.level)
        return LogLevel(level=logs.current_level())


def find_changes(before: Config, now: Config) -> Iterator[_SettingChange]:
    """Yield the differences, in the order of the sections. A table that is new, or gone, is one change."""
    for name in type(now).model_fields:
        old, new = getattr(before, name), getattr(now, name)
        if old is None or new is None:
            if old is not new:
                yield _SettingChange(name, old, new)
            continue
        for key in {**type(old).model_fields, **type(new).model_fields}:
            was, is_now = _value_of(old, key, new), _value_of(new, key, old)
            if was != is_now:
                yield _SettingChange(f"{name}.{key}", was, is_now)


def _value_of(table: Section, key: str, other: Section) -> object:
    """Return a value of a table; where it has no such key, the default of the other: a node in no cluster has only some
    keys of [cluster]."""
    fields = type(table).model_fields
    return getattr(table, key) if key in fields else type(other).model_fields[key].default


def _with_changes(config: Config, found: list[_SettingChange]) -> Config:
    """Return *config* with only these changes."""
    sections: dict[str, dict[str, Any]] = {}
    for change in found:
        section, key = change.key.split(".")
        sections.setdefault(section, {})[key] = change.now
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _text(value: object) -> str:
    if isinstance(value, Section):
        return "a table"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or _NONE
    return _NONE if value is None or value == "" else str(value)
