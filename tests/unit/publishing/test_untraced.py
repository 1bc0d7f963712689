"""torch.compile leaves our functions alone, in whatever module they are."""

from types import CodeType, SimpleNamespace

import pytest
import torch

from cachefs.hooks import loader
from cachefs.publishing import channel, stderr
from cachefs.publishing.page import SharedPage
from cachefs.publishing.stderr import OwnDescriptor


def test_what_the_hooks_call_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    excluded: list[CodeType] = []
    frames = SimpleNamespace(skip_code=excluded.append)
    monkeypatch.setattr(torch._C, "_dynamo", SimpleNamespace(eval_frame=frames))
    loader.exclude_from_compile()
    number = OwnDescriptor.number.fget  # type: ignore[attr-defined]
    for function in (
        loader.install,
        channel.print_line,
        stderr.write_line,
        stderr.is_writable_now,
        number,
        SharedPage.create,
    ):
        assert function.__code__ in excluded, function
