"""What a supervisor reads after a process's end, and certifies to those that run."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator

import pytest

from farflung.comm.visits import Access
from farflung.membership import EndCertificate, MemberReport, MessageCodec, Page, View, announce_end
from farflung.membership.supervision import SUPERVISOR
from tests.comm.test_visits import KEY, Member

VIEW = View(1, ("0", "1", "2"), (0,), (("0", "1", "2"),))
ACCESS = Access(KEY, False, ["127.0.0.1:1"])


def test_a_page_has_the_latest_text_after_a_kill_at_any_moment() -> None:
    """The child says by a pipe what it has written wholly; what is read is that or the text after it."""
    page = Page()
    page.write_access("0", ACCESS)
    for delay in range(12):
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                for number in range(1 << 30):
                    page.write_report(b"%d " % number * (1 + number % 3000))
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
        found = page.read()
        assert found is not None
        name, access, text = found
        assert (name, access) == ("0", ACCESS)
        number = int(text.split()[0])
        assert text == b"%d " % number * (1 + number % 3000)
        assert number >= count - 1


def test_a_page_that_was_never_written_certifies_nothing() -> None:
    assert Page().read() is None
    assert announce_end(Page(), -9) == []


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a report of 2,097,\d+ bytes"):
        Page().write_report(bytes(1 << 21))


def test_a_page_is_inherited_from_the_parent_alone() -> None:
    fd = Page.create_memory()
    ours = Page(fd)
    own = {SUPERVISOR: f"{os.getppid()}:{fd}"}
    assert Page.from_environment({}) is None
    assert Page.from_environment({SUPERVISOR: f"{os.getpid()}:{fd}"}) is None
    for name in "12":  # the later run of a process takes the place of the earlier
        page = Page.from_environment(own)
        assert page is not None
        page.write_access(name, ACCESS)
        page.write_report(name.encode())
        page.write_report(name.encode())
        assert ours.read() == (name, ACCESS, name.encode())
    os.close(fd)


@pytest.fixture
def members() -> Iterator[list[Member]]:
    made = [Member(), Member()]
    yield made
    for member in made:
        member.close()


@pytest.mark.parametrize("will", [None, MemberReport(VIEW, {}, {}, (3,), None)])
def test_the_others_get_a_certificate_with_the_will(will: MemberReport | None, members: list[Member]) -> None:
    page, codec = Page(), MessageCodec(KEY)
    gone = Member()
    gone.close()
    page.write_access("1", Access(KEY, False, [members[0].place, gone.place, members[1].place]))
    if will is not None:
        page.write_report(codec.encode(will))
    for thread in announce_end(page, -9):
        thread.join()
    for member in members:
        (question,) = member.asked
        message = codec.decode(json.loads(question)["certificate"].encode())
        assert isinstance(message, EndCertificate)
        assert message[:3] == ("1", -9, will)
