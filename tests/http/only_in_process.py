"""Tests of what only a server in Perdure's own process has or does: `PERDURE_TEST_SERVER=stdio` leaves them out."""

from collections.abc import Mapping, Sequence

_TESTS: Mapping[str, Sequence[str]] = {
    "a pipe does not say which of several calls asks, and whether an ask belongs to a call": (
        "test_an_ask_comes_on_the_stream_of_its_call_or_on_the_standalone_stream",
        "test_answers_find_the_call_that_waits",
        "test_answers_to_asks_may_come_in_a_batch",
        "test_asks_tied_to_a_call_are_refused",
    ),
    "a process lives as long as its session is loaded, also if it is not used": (
        "test_a_dropped_runtime_comes_back_unnoticed",
        "test_a_runtime_with_a_running_call_is_not_dropped",
        "test_a_session_object_that_a_tool_kept_can_notify_after_the_runtime_was_dropped",
        "test_the_log_level_is_set_again_when_the_runtime_comes_back",
        "test_a_refused_log_level_is_not_repeated",
        "test_the_home_keeps_its_runtime_while_something_is_subscribed",
    ),
    "a new process may have other lists, and its client is told so": (
        "test_a_session_at_rest_is_loaded_with_its_sticky_requests_once",
        "test_a_reconnect_stops_the_timer_and_a_reattach_wakes",
        "test_two_resumes_load_their_session_and_the_later_one_wins",
    ),
    "what tools declare is known once they were listed, a moment after the handshake": (
        "test_a_task_where_it_is_forbidden_and_none_where_it_is_required_are_refused",
    ),
    "a process takes longer to start than a session of this test may be unused": (
        "test_a_request_in_the_moment_of_resting_finds_its_session",
        "test_a_dormant_session_is_resumed_and_its_time_begins_again",
        "test_a_chain_expires_with_its_session",
        "test_sessions_do_not_leak",
    ),
    "a tool cannot close a connection of the gateway": (
        "test_what_was_sent_before_the_close_arrives_and_the_rest_is_resumed",
        "test_closing_as_the_first_act_still_primes",
        "test_closing_again_and_again",
        "test_a_tool_can_close_the_standalone_connection",
        "test_a_standalone_connection_closed_before_any_event_was_primed",
    ),
    "a tool that takes down its runtime is caught by the SDK in its own process": (
        "test_a_tool_that_dies_is_answered_and_takes_no_other_call_down",
    ),
    "each process enters the lifespan": ("test_the_lifespan_is_entered_once_with_both_eras_in_use",),
    "progress that does not rise, and progress of no call, end at the gateway": (
        "test_what_a_tool_says_behind_a_beat_arrives_with_its_text_and_a_higher_value",
        "test_beats_never_fall_whatever_the_tool_says",
        "test_a_token_of_the_tools_own_is_left_as_it_is",
    ),
    "a pipe never waits for a reader": ("test_the_call_of_a_client_that_does_not_read_waits_and_nobody_else",),
    "the server's own authentication guards its own process, and no token goes to another": (
        "test_a_servers_own_auth_guards_the_broker_too",
        "test_a_fresh_token_of_the_same_principal_is_what_tools_see",
    ),
    "the SDK's server has no way to ask within a call of 2026-07-28": (
        "test_a_request_that_brings_an_answer_is_answered_early_too",
        "test_a_question_before_the_early_answer_is_a_round_and_one_behind_it_a_round_of_the_wait",
        "test_a_question_is_told_to_a_client_that_cannot_be_asked",
        "test_a_refusal_behind_progress_ends_the_event_stream_in_order",
        "test_an_answer_right_behind_a_question_is_written_whole",
    ),
    "the gateway subscribes to its upstream by rules of its own (`gateway.changes`)": (
        "test_a_client_that_takes_nothing_is_let_go_of",
        "test_a_server_that_refuses_our_own_subscription_serves_its_listeners_itself",
        "test_a_server_whose_author_switched_subscriptions_off_has_none",
        "test_a_list_that_cannot_be_read_counts_as_changed",
        "test_a_subscription_that_the_server_ends_is_opened_again_and_everything_may_have_changed",
        "test_nothing_falls_between_two_subscriptions_to_the_server_when_more_is_wanted",
        "test_a_listener_does_not_wait_long_for_a_node_that_does_not_answer",
        "test_a_node_that_lacks_what_others_announced_asks_for_it",
    ),
}

ONLY_IN_PROCESS: Mapping[str, str] = {name: why for why, names in _TESTS.items() for name in names}
"""The names of tests, and the reasons."""
