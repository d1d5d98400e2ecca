"""What sessions share of their records."""

from perdure.sessions.record_keeper import SHARED_BYTES, share


def test_equal_handshakes_are_one_object_and_large_ones_are_not_kept() -> None:
    small, large = b"s" * SHARED_BYTES, b"l" * (SHARED_BYTES + 1)
    assert share(bytes(bytearray(small))) is share(bytes(bytearray(small)))
    assert share(copy := bytes(bytearray(large))) is copy
    assert share(large) is large
