"""Connections driven by hand: which get in, which rank each is bound to, what the store cannot do, what is bound."""

from __future__ import annotations

import datetime
import re
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
import torch.distributed as dist
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from farflung.comm import Endpoint, TcpTransport, handshake
from farflung.comm import keys as keys_module
from farflung.comm.keys import Keys, convert_to_der
from farflung.comm.wire import VERSION
from farflung.errors import ConfigError, ProtocolError
from farflung.wall import WallRuntime
from tests.helpers import PATIENCE_S, Group
from tests.proxy import Proxy
from tests.strangers import (
    CLIENT_HELLO,
    FORGED,
    HELLO,
    NOISE,
    Clock,
    abort,
    exactly,
    forged,
    greeting,
    introduced,
    knock,
    may_be_closed,
    message,
    patiently,
    sealed,
    until_closed,
)

SIZE = 3


class Sealed(Group):
    """Communicators with a key each."""

    def __init__(self, size: int = SIZE, **options: object) -> None:
        super().__init__(0)
        self.keys = [Keys.generate() for _ in range(size)]
        transports = [
            TcpTransport(rank, size, keys=keys, **options)  # type: ignore[arg-type]
            for rank, keys in enumerate(self.keys)
        ]
        self.take(transports, [{}] * size)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def encrypted(clock: Clock) -> Iterator[Sealed]:
    """Their clock stands still: who is refused is so at once."""
    members = Sealed()
    yield members
    members.close()


@pytest.fixture(params=[Group, Sealed], ids=["plain", "sealed"])
def members(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Group]:
    """Rank 0 lets others in already, which have not come yet; their clock stands still."""
    group = request.param(SIZE)
    group.comms[0].session.members.connect(group.peers)
    yield group
    group.close()


def work(members: Group) -> None:
    for view in members._open:
        view.transport.poll(0.005)


# --- which rank a connection is bound to ------------------------------------------------------------------------


def test_a_peer_with_another_key_is_not_that_rank(encrypted: Sealed) -> None:
    one, two = encrypted.comms[:2]
    one.session.members.connect(encrypted.peers)
    two.session.members.connect(
        [replace(encrypted.peers[0], key=Keys.generate().public), *encrypted.peers[1:]]
    )
    assert re.search(
        r"its greeting: is it running, and can \S+ be reached from here\?",
        str(two.session.members.build_timeout(1.0)),
    )
    encrypted.until(
        lambda: (
            "did not prove to be that rank" in str(two.session.members.build_timeout(1.0))
            and one.session.transport.refusals.num_connections > 0
        )
    )
    assert 0 in two.session.members.missing_ranks
    assert 1 in one.session.members.missing_ranks
    assert two.session.mailbox.ended.error is None


def test_a_peer_that_is_not_on_the_list_is_told_so(encrypted: Sealed) -> None:
    one, two = encrypted.comms[:2]
    one.session.members.connect(
        [encrypted.peers[0], replace(encrypted.peers[1], key=Keys.generate().public), encrypted.peers[2]]
    )
    two.session.members.connect(encrypted.peers)
    encrypted.until(
        lambda: (
            two.session.mailbox.ended.error is not None
            and one.session.transport.refusals.num_connections == 1
        )
    )
    assert isinstance(two.session.mailbox.ended.error, ProtocolError)
    assert (
        str(two.session.mailbox.ended.error)
        == "rank 0 does not accept this replica's key: it was given another list"
    )
    assert one.session.mailbox.ended.error is None


def into(members: Group, rank: int, keys: Keys | None) -> socket.socket:
    """A connection to a rank, with TLS where it has that."""
    link = knock(members.comms[rank])
    key = members.peers[rank].key
    return link if key is None else sealed(link, keys or Keys.generate(), key)


Arm = Callable[[Group], bool]


def _under_anothers_name(members: Group) -> bool:
    """Rank 2, which knows all tokens, says that it is rank 1."""
    assert isinstance(members, Sealed)
    with into(members, 0, members.keys[2]) as link:
        return introduced(link, members.peers[1], members.peers[0])


def _signed_by_a_member(members: Group) -> bool:
    """A certificate that rank 1's key has signed, which is sent along."""
    assert isinstance(members, Sealed)
    issuer = serialization.load_pem_private_key(members.keys[1].secret.encode(), None)
    assert isinstance(issuer, ec.EllipticCurvePrivateKey)
    above = x509.load_der_x509_certificate(convert_to_der(members.keys[1].public))
    key = ec.generate_private_key(ec.SECP256R1())
    leaf = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "leaf")]))
        .issuer_name(above.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(issuer, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with tempfile.NamedTemporaryFile() as file:
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        file.write(key.private_bytes(pem, *form) + leaf.public_bytes(pem) + above.public_bytes(pem))
        file.flush()
        context.load_cert_chain(file.name)
    with may_be_closed(), context.wrap_socket(knock(members.comms[0])) as link:
        return introduced(link, members.peers[1], members.peers[0])
    return False


def _self_made(members: Group) -> bool:
    with may_be_closed(), into(members, 0, Keys.generate()) as link:
        return introduced(link, members.peers[1], members.peers[0])
    return False


@pytest.mark.parametrize("arm", [_under_anothers_name, _signed_by_a_member, _self_made])
def test_another_certificate_is_refused(arm: Arm, encrypted: Sealed) -> None:
    first = encrypted.comms[0]
    first.session.members.connect(encrypted.peers)
    let_in: list[bool] = []
    patiently(lambda: let_in.append(arm(encrypted)), lambda: work(encrypted))
    assert let_in == [False]
    encrypted.until(lambda: first.session.transport.refusals.num_connections == 1)
    encrypted.meet().exchange(1)
    assert first.session.mailbox.ended.error is None


def test_a_certificate_that_verifies_has_to_be_the_one_published(
    encrypted: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where OpenSSL has nothing against the certificate: it is compared."""
    contexts = keys_module.build_tls_context

    def lenient(keys: Keys, accepted: list[str], *, is_server: bool) -> ssl.SSLContext:
        context = contexts(keys, accepted, is_server=is_server)
        if is_server:
            context.verify_mode = ssl.CERT_OPTIONAL
            context.load_verify_locations(cadata=convert_to_der(stranger.public))
        return context

    stranger = Keys.generate()
    monkeypatch.setattr(handshake, "build_tls_context", lenient)
    first = encrypted.comms[0]
    first.session.members.connect(encrypted.peers)
    let_in: list[bool] = []

    def come() -> None:
        with into(encrypted, 0, stranger) as link:
            let_in.append(introduced(link, encrypted.peers[1], encrypted.peers[0]))

    patiently(come, lambda: work(encrypted))
    assert let_in == [False]


def test_a_member_cannot_take_the_place_of_a_rank_that_is_connected_to(members: Group) -> None:
    second = members.comms[1]
    second.session.members.connect(members.peers)
    keys = members.keys[2] if isinstance(members, Sealed) else None
    let_in: list[bool] = []

    def come() -> None:
        with may_be_closed(), into(members, 1, keys) as link:
            let_in.append(introduced(link, members.peers[0], members.peers[1]))

    patiently(come, lambda: work(members))
    assert let_in in ([], [False])
    members.meet().exchange(1)
    assert second.session.mailbox.ended.error is None


def test_a_rank_that_has_not_greeted_has_no_say(members: Group) -> None:
    first = members.comms[0]
    links: list[socket.socket] = []

    def come() -> None:
        links.append(into(members, 0, members.keys[1] if isinstance(members, Sealed) else None))
        assert introduced(links[0], members.peers[1], members.peers[0])
        links[0].sendall(message(abort()))

    patiently(come, lambda: work(members))
    with closing(links[0]):
        members.until(lambda: first.session.transport.refusals.num_messages == 1)
        links[0].sendall(message(greeting(1)))
        members.until(lambda: first.session.members.missing_ranks == [2])


def test_no_rank_gets_in_before_the_list_is_known(encrypted: Sealed) -> None:
    late = encrypted.comms[0]
    for comm in encrypted.comms[1:]:
        comm.session.members.connect(encrypted.peers)
    for _ in range(20):
        work(encrypted)
    assert 0 in encrypted.comms[1].session.members.missing_ranks
    late.session.members.connect(encrypted.peers)
    encrypted.until(lambda: all(comm.session.members.ready.is_done for comm in encrypted.comms))


def test_a_second_connection_of_a_member_is_refused(members: Group) -> None:
    """Even with all that the member knows: another process that has stolen it does not take its place."""
    group = members.meet()
    group.transports[0].handshaker.num_expected = 1
    group.transports[0].handshaker.update_accepting()
    for index in (0, 1, 200):
        let_in: list[bool] = []

        def come(index: int = index, let_in: list[bool] = let_in) -> None:
            with into(group, 0, group.keys[1] if isinstance(group, Sealed) else None) as link:
                let_in.append(introduced(link, group.peers[1], group.peers[0], index))

        patiently(come, lambda: work(group))
        assert let_in == [False]
    group.exchange(1)
    assert group.comms[0].session.mailbox.ended.error is None


# --- strangers --------------------------------------------------------------------------------------------------


def _says_nothing(link: socket.socket, members: Group) -> None:
    del members
    link.shutdown(socket.SHUT_WR)


def _a_guess(link: socket.socket, members: Group) -> None:
    introduced(link, replace(members.peers[1], token=bytes(16)), members.peers[0])


def _what_is_good_elsewhere(link: socket.socket, members: Group) -> None:
    """What rank 1 would say to a process that has taken the place of rank 2."""
    introduced(link, members.peers[1], members.peers[2])


def _no_rank(link: socket.socket, members: Group) -> None:
    introduced(link, replace(members.peers[1], rank=7), members.peers[0])


def _as_rank_2(link: socket.socket, members: Group) -> None:
    introduced(link, members.peers[1], members.peers[0], rank=2)


def _a_later_connection(link: socket.socket, members: Group) -> None:
    introduced(link, members.peers[1], members.peers[0], 1)


def _messages_at_once(link: socket.socket, members: Group) -> None:
    del members
    link.sendall(message(greeting(1)) + message(forged()) + message(abort()))
    until_closed(link)


@pytest.mark.parametrize(
    "say",
    [
        _says_nothing,
        _a_guess,
        _what_is_good_elsewhere,
        _no_rank,
        _as_rank_2,
        _a_later_connection,
        _messages_at_once,
    ],
)
def test_a_stranger_gets_nothing_in(say: Callable[[socket.socket, Group], None], members: Group) -> None:
    first = members.comms[0]

    def come() -> None:
        keys = members.keys[1] if isinstance(members, Sealed) else None
        with may_be_closed(), into(members, 0, keys) as link:
            say(link, members)

    patiently(come, lambda: work(members))
    members.until(lambda: first.session.transport.refusals.num_connections == 1)
    assert (first.session.transport.refusals.num_messages, first.session.members.missing_ranks) == (0, [1, 2])
    wanted = first.recv_any(FORGED)
    members.meet().exchange(1)
    assert first.session.mailbox.ended.error is None
    assert not wanted.is_done


def test_an_introduction_played_again_gets_nothing_in(members: Group) -> None:
    """The nonce of each connection is another one."""
    first, second = members.comms[:2]
    with closing(Proxy(first.session.transport.local_peer.address_text)) as proxy:
        second.session.members.connect([replace(members.peers[0], address=proxy.address), *members.peers[1:]])
        members.until(
            lambda: first.session.members.missing_ranks == [2] and second.session.members.missing_ranks == [2]
        )
        (recorded,) = map(bytes, proxy.to_target)
        with knock(first) as stranger:
            stranger.sendall(recorded)
            stranger.shutdown(socket.SHUT_WR)
            members.until(lambda: first.session.transport.refusals.num_connections == 1)
            until_closed(stranger)
        members.meet().exchange(1)
        assert first.session.mailbox.ended.error is None


def test_an_impostor_that_replays_an_acceptor_is_found_out() -> None:
    """The dialler's nonce: an acceptor that does not know the tokens cannot answer it."""
    with closing(Group(2)) as members, socket.create_server(("127.0.0.1", 0)) as impostor:
        address = f"tcp://127.0.0.1:{impostor.getsockname()[1]}"
        recorded: list[bytes] = []
        told: list[bytes] = []

        def answer() -> None:
            link, _ = impostor.accept()
            link.settimeout(PATIENCE_S / 3)
            with link:
                link.sendall(b"FF" + bytes([VERSION, 0]) + bytes(16))
                recorded.append(exactly(link, HELLO.size))
                link.sendall(bytes(32))
                with may_be_closed():
                    told.append(link.recv(1))

        second = members.comms[1]
        second.session.members.connect([replace(members.peers[0], address=address), members.peers[1]])
        patiently(answer, lambda: second.session.transport.poll(0.005))
        assert recorded
        assert not any(told)
        members.until(
            lambda: "did not prove to be that rank" in str(second.session.members.build_timeout(1.0))
        )
        assert second.session.members.missing_ranks == [0]


def test_refusals_are_logged_with_their_count_each_time_it_has_doubled(
    members: Group, caplog: pytest.LogCaptureFixture
) -> None:
    first = members.comms[0]
    for known in range(1, 6):
        with knock(first) as stranger:
            stranger.sendall(NOISE["another protocol"])
            stranger.shutdown(socket.SHUT_WR)
            members.until(lambda known=known: first.session.transport.refusals.num_connections == known)  # type: ignore[misc]
    assert caplog.messages == [
        f"rank 0 at {first.session.transport.local_peer.address}: refused a connection that is not of this run; "
        f"0 messages and "
        f"{count} connections so far"
        for count in (1, 2, 4)
    ]


@pytest.mark.parametrize("what", NOISE)
def test_noise_is_cut_off(what: str, members: Group) -> None:
    first = members.comms[0]
    with knock(first) as stranger:
        stranger.sendall(NOISE[what])
        stranger.shutdown(socket.SHUT_WR)
        members.until(lambda: first.session.transport.refusals.num_connections == 1)
        until_closed(stranger)
    members.meet().exchange(1)
    assert first.session.mailbox.ended.error is None


def test_a_connection_that_says_nothing_is_cut_off(members: Group, clock: Clock) -> None:
    first = members.comms[0]
    with ExitStack() as stack:
        links = [stack.enter_context(knock(first)) for _ in range(5)]
        for link in links[::2]:
            link.sendall(CLIENT_HELLO[:5])
        early = members.transports[0].handshaker.connections
        members.until(lambda: sum(link.dialed_rank is None for link in early) == 5)
        clock.now_s = handshake.HANDSHAKE_S - 0.1
        work(members)
        assert first.session.transport.refusals.num_connections == 0
        clock.now_s = handshake.HANDSHAKE_S + 0.1
        members.until(lambda: first.session.transport.refusals.num_connections == 5)
        for link in links:
            until_closed(link)
    members.meet().exchange(1)


def test_the_store_cannot_exchange_two_ranks_of_one_machine() -> None:
    members = Group(3, keys=Keys.generate())
    zero, one, two = (comm.session.transport.local_peer for comm in members.comms)
    with closing(members):
        members.comms[0].session.members.connect([zero, one, two])
        members.comms[1].session.members.connect([zero, one, two])
        members.comms[2].session.members.connect([replace(one, rank=0), replace(zero, rank=1), two])
        members.until(lambda: members.comms[2].session.transport.refusals.num_messages == 2)
        assert members.comms[2].session.members.missing_ranks == [0, 1]


def test_the_store_may_not_name_a_replica_twice(encrypted: Sealed) -> None:
    one, two, three = encrypted.peers
    with pytest.raises(ProtocolError, match="names one replica twice"):
        encrypted.comms[2].session.members.connect([one, replace(two, token=one.token), three])


# --- what is bound ----------------------------------------------------------------------------------------------

ELSEWHERE = "192.0.2.1"  # an address for documentation: no machine has it


def test_nothing_leaves_the_machine_without_encryption() -> None:
    with pytest.raises(ConfigError, match="without encryption"):
        TcpTransport(0, 2, interface=ELSEWHERE)


@pytest.mark.parametrize("interface", ["0.0.0.0", "::", "*", "localhost"])
def test_one_address_is_bound(interface: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        TcpTransport(0, 2, interface=interface, keys=Keys.generate())


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"interface {ELSEWHERE}: cannot listen there"):
        WallRuntime(0, 2, dist.HashStore(), endpoint=Endpoint(ELSEWHERE))


def test_native_collectives_stay_on_one_machine() -> None:
    with pytest.raises(ConfigError, match="not encrypted"):
        WallRuntime(0, 2, dist.HashStore(), endpoint=Endpoint(ELSEWHERE), is_native=True)


def test_ipv6() -> None:
    with closing(Sealed(2, interface="::1")) as members:
        members.meet().exchange(1)
        assert members.transports[0].local_peer.address_text.startswith("tcp://[::1]:")
