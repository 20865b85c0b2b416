"""What a well-formed `reward` section can still get wrong. Starts no worker and opens no file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from megarl.config.reward import (
    BySourceRewardConfig,
    ExactRewardConfig,
    HttpRewardConfig,
    RegexRewardConfig,
    RewardConfig,
    SingleRewardConfig,
)
from megarl.errors import Problem


def check_rewards(config: RewardConfig) -> Iterator[Problem]:
    if isinstance(config, BySourceRewardConfig):
        for name, part in config.sources.items():
            yield from _single(part, f"reward.sources.{name}")
    else:
        yield from _single(config, "reward")


def _single(config: SingleRewardConfig, key: str) -> Iterator[Problem]:
    if isinstance(config, ExactRewardConfig):
        return
    if config.on_error == "value" and config.error_value is None:
        yield Problem(key=f"{key}.error_value", message="missing; on_error value needs the score to give")
    if config.on_error != "value" and config.error_value is not None:
        yield Problem(
            key=f"{key}.error_value", message=f"has no use with on_error {config.on_error}; remove it or set value"
        )
    if isinstance(config, HttpRewardConfig) and urlsplit(config.url).username is not None:
        # Said without the value: it is a secret.
        yield Problem(key=f"{key}.url", message="has a user or password in it; put the key in api_key_file")
    if isinstance(config, RegexRewardConfig):
        try:
            re.compile(config.pattern)
        except re.error as error:
            yield Problem(key=f"{key}.pattern", message=f"{config.pattern!r} is no regular expression: {error}")
