"""What a supervisor reads after a process's end, and certifies to those that run."""

from __future__ import annotations

import os
import random
import signal

import pytest

from farflung.membership import Certificate, Codec, Page, Report, Supervisor, View

KEY = b"key"
VIEW = View(1, ("0", "1", "2"), (0,), (("0", "1", "2"),))


def test_a_page_has_the_latest_text_after_a_kill_at_any_moment() -> None:
    """The child says by a pipe what it has written wholly; what is read is that or the text after it."""
    page = Page()
    for delay in range(12):
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                for number in range(1 << 30):
                    page.write(b"%d " % number * (1 + number % 3000))
                    os.write(writes, b".")
            finally:
                os._exit(1)
        os.close(writes)
        for _ in range(random.Random(delay).randrange(1, 60)):
            os.read(reads, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        count = 0
        while more := os.read(reads, 1 << 16):
            count += len(more)
        os.close(reads)
        number = int(page.read().split()[0])
        assert page.read() == b"%d " % number * (1 + number % 3000)
        assert number >= count - 1


def test_a_page_that_was_never_written_is_empty() -> None:
    assert Page().read() == b""


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="a report of 2,097,152 bytes"):
        Page().write(bytes(1 << 21))


@pytest.mark.parametrize("will", [None, Report(VIEW, {}, {}, (3,), None)])
def test_those_that_run_get_a_certificate_with_the_will(will: Report | None) -> None:
    supervisor, codec = Supervisor(KEY, 3), Codec(KEY)
    if will is not None:
        supervisor.processes[1].page.write(codec.encode(will))
    supervisor.ended(1, -9, [0, 2])
    for rank in (0, 2):
        message = codec.decode(supervisor.processes[rank].certificates.recv(1 << 20))
        assert isinstance(message, Certificate)
        assert message[:3] == ("1", -9, will)
    supervisor.close()
