from perdure._core.lines import EDGE_BYTES, Cutter, TooLong


def test_lines_are_cut_wherever_the_bytes_are_cut() -> None:
    cutter = Cutter(limit=8)
    assert cutter.feed(b'{"a"') == []
    assert cutter.feed(b":1}\r\n\n  \n[]\n{") == [b'{"a":1}', b"[]"]
    assert cutter.feed(b"123456789\n") == [TooLong(head=b"{123456789", tail=b"{123456789")]
    assert cutter.feed(b"12345678\n1") == [b"12345678"]
    assert cutter.feed(b"23456789") == []
    assert cutter.feed(b"0\n") == [TooLong(head=b"123456789", tail=b"1234567890")]
    assert cutter.feed(b"123456789\n12345678\n") == [TooLong(head=b"123456789", tail=b"123456789"), b"12345678"]
    assert cutter.feed(b"end") == []
    assert cutter.feed(b"\n") == [b"end"]
    assert cutter.feed(b"\n") == []


def test_a_line_that_is_too_long_keeps_its_edges_only() -> None:
    whole = b"".join(b"%d," % number for number in range(20_000))
    for size in (1, 7, EDGE_BYTES, EDGE_BYTES + 1, len(whole)):
        cutter = Cutter(limit=EDGE_BYTES)
        lines = [line for at in range(0, len(whole), size) for line in cutter.feed(whole[at : at + size])]
        [line] = lines + cutter.feed(b"\n")
        assert isinstance(line, TooLong)
        assert whole.startswith(line.head)
        assert whole.endswith(line.tail)
        assert len(line.head) == EDGE_BYTES
        assert len(line.tail) == EDGE_BYTES
