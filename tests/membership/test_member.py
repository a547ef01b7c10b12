"""What single members do: wishes, stops, answers, and views whose exchanges are whole on some members alone."""

from __future__ import annotations

from farflung.membership import Handover, MemberReport, View, Vote
from tests.membership.script import Script


def test_redo_brings_the_same_members_a_new_number() -> None:
    script = Script("abc")
    script.members["b"].request_new_view()
    script.until_quiet()
    view = View(2, tuple("abc"), (0,), (tuple("abc"),))
    assert [member.view for member in script.members.values()] == [view] * 3
    assert not any(member.is_frozen for member in script.members.values())


def test_redo_is_no_wish_while_the_view_ends_anyway() -> None:
    script = Script("abc")
    script.lose("a", "c")
    ballot = script.kept["a"].ballot
    script.members["a"].request_new_view()
    script.members["a"].process_events()
    assert script.kept["a"].ballot == ballot


def test_a_member_votes_once_at_each_ballot() -> None:
    """Another vote at the same ballot might be for another view, where a report has changed meanwhile."""
    script = Script("abc")
    script.lose("a", "c")
    script.lose("b", "c")
    script.pass_on("ab", "ba")
    script.pass_on("ba")
    (vote,) = [message for message in script.wires["a", "b"] if isinstance(message, Vote)]
    script.held["a"] = (0, 1)
    for _ in range(3):
        script.members["a"].process_events()
    assert [message for message in script.wires["a", "b"] if isinstance(message, Vote)] == [vote]


def test_the_last_member_leaves_a_view_without_members() -> None:
    script = Script("a")
    script.members["a"].leave()
    script.until_quiet()
    assert script.members["a"].view == View(2, (), (0,), (("a",),))
    assert script.reasons == {"a": "left with view 2"}


def test_a_member_that_leaves_hands_over_what_it_alone_holds() -> None:
    script = Script("abc")
    script.held = {"a": (4,), "b": (4, 6), "c": (5,)}
    script.members["b"].leave()
    script.until_quiet()
    view = View(2, ("a", "c"), (4, 5, 6), (("c", "a", "b"), ("c",), ("b",)))
    assert script.members["a"].view == script.members["c"].view == view
    assert script.handed == {"b": view, "c": view}
    assert view.list_handovers() == [Handover("c", "a", 5), Handover("b", "a", 6), Handover("b", "c", 6)]


def test_exchanges_in_flight_are_the_union_of_what_members_hold() -> None:
    script = Script("abc")
    script.held = {"a": (7, 9), "b": (8,), "c": (7, 10)}
    script.members["a"].request_new_view()
    script.until_quiet()
    holders = (("a", "b", "c"), ("b",), ("a",), ("c",))
    assert script.members["a"].view == View(2, tuple("abc"), (7, 8, 9, 10), holders)


def test_a_joiner_receives_the_state_and_is_the_most_junior() -> None:
    script = Script("ab")
    script.held = {"a": (3,), "b": (4,)}
    joiner = script.join("A")
    script.until_quiet()
    assert joiner.view == View(2, ("a", "b", "A"), (3, 4), (("b", "a"), ("b",)))
    assert joiner.view is not None
    assert joiner.view.list_handovers() == [Handover("b", "A", 3), Handover("b", "a", 4)]


def test_a_guest_that_some_members_cannot_reach_is_not_let_in() -> None:
    script = Script("abc")
    joiner = script.join("d")
    script.members["c"].handle_loss("d")
    script.until_quiet()
    assert joiner.view is None
    assert not any(script.members[x].is_frozen for x in "abc")
    joiner.give_up()
    assert script.reasons == {"d": "no view has admitted this process"}


def test_a_process_without_a_view_leaves_at_once() -> None:
    script = Script("ab")
    script.join("c").leave()
    assert script.reasons == {"c": "no view has admitted this process"}


def test_a_view_whose_members_lack_the_model_stops_by_name() -> None:
    script = Script("a")
    joiner = script.join("b")
    script.until_quiet()
    assert joiner.view is not None
    script.members["b"].handle_loss("a")
    script.certify("a", "b")  # before it could give the state
    joiner.process_events()
    assert script.reasons == {"b": "no member of view 3 holds the model"}


def test_with_a_quorum_of_one_both_halves_go_on() -> None:
    script = Script("ab", quorum=1)
    script.lose("a", "b")
    script.lose("b", "a")
    views = [script.members[x].view for x in "ab"]
    assert views == [View(2, (x,), (0,), ((x,),)) for x in "ab"]
    script.members["a"].handle_connection("b")
    script.members["b"].handle_connection("a")
    script.until_quiet()
    assert [script.members[x].view for x in "ab"] == views
    script.members["b"].request_new_view()
    script.until_quiet()
    assert script.reasons == {"a": "evicted by view 3"}


def test_give_up_does_nothing_while_the_view_goes_on() -> None:
    script = Script("ab")
    script.members["a"].give_up()
    assert not script.members["a"].is_stopped


def test_a_member_that_gives_up_counts_as_dead() -> None:
    script = Script("abcd")
    for name, other in ("ac", "ad", "bc", "bd", "ca", "cb", "da", "db"):
        script.lose(name, other)
    script.wires.clear()  # a and b could decide, but hear nothing of each other
    script.members["a"].give_up()
    assert script.reasons == {
        "a": "no agreement on view 2; connected: b; may be alive: c, d; "
        "needed: more than half of 4 members, or half with a"
    }
    script.pass_on("ab")
    script.members["b"].handle_connection("c")
    script.members["c"].handle_connection("b")
    script.until_quiet()
    assert script.members["b"].view == script.members["c"].view == View(2, ("b", "c"), (0,), (("b", "c"),))


def test_one_that_ends_on_an_error_counts_as_dead() -> None:
    """It certifies itself, so of two the junior goes on, where no process certifies the end of another."""
    script = Script("ab")
    script.held["a"] = (1,)
    script.members["a"].end()
    script.members["a"].end()
    script.pass_on("ab")
    script.until_quiet()
    assert script.members["a"].is_stopped
    assert script.members["b"].view == View(2, ("b",), (0,), (("b",),))


def test_a_report_of_an_older_view_is_answered_though_no_connection_was_lost_here() -> None:
    script = Script("abc")
    for name, other in ("ac", "bc"):
        script.lose(name, other)
    script.wires["a", "c"].clear()
    script.wires["b", "c"].clear()
    script.pass_on("ab", "ba")
    script.pass_on("ab", "ba")
    script.pass_on("ab", "ba")
    assert script.members["b"].view == View(2, ("a", "b"), (0,), (("a", "b"),))
    script.members["b"].connected_names.add("c")  # its transport has replaced a connection and told nothing
    script.wires.clear()
    script.lose("c", "a")
    script.until_quiet()
    assert script.reasons == {"c": "evicted by view 2"}


def test_a_process_in_no_relation_is_no_concern() -> None:
    script = Script("ab")
    script.members["a"].handle_loss("elsewhere")
    script.certify("b", "b")
    script.until_quiet()
    assert not any(member.is_frozen for member in script.members.values())


def test_one_that_is_suspended_takes_no_older_view_for_its_own() -> None:
    """Another that was suspended too tells it of the view before."""
    script = Script("abc")
    script.returns = True
    script.lose("a", "c")
    script.lose("b", "c")
    script.until_quiet()
    left, view = script.members["c"], View(1, tuple("abc"), (0,), (tuple("abc"),))
    left.handle_message("a", MemberReport(View(2, ("a", "b"), (0,), (("a", "b"),)), {}, {}, None, None))
    assert left.view is None
    left.handle_message("b", MemberReport(view, {}, {}, None, None))
    assert left.view is None
    again = View(3, tuple("abc"), (0,), (("a", "b"),))
    left.handle_message("a", MemberReport(again, {}, {}, None, None))
    assert left.view == again
