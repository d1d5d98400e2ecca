"""Which server a store belongs to, as a table."""

import pytest

from perdure.store.owner import Owner

A = Owner(name="bakery", machine="here", file="/srv/a.py", folder="/srv")


@pytest.mark.parametrize(
    ("other", "is_there", "expected"),
    [
        (A, True, True),
        (Owner(name="renamed", machine="here", file="/srv/a.py", folder="/srv"), True, True),
        (Owner(name="bakery", machine="here", file="/srv/b.py", folder="/srv"), True, False),
        (Owner(name="bakery", machine="here", file="/srv/b.py", folder="/srv"), False, True),
        (Owner(name="mill", machine="here", file="/srv/b.py", folder="/srv"), False, False),
        (Owner(name="bakery", machine="here", file="/release/2/a.py", folder="/release/2"), True, True),
        (Owner(name="mill", machine="here", file="/release/2/a.py", folder="/release/2"), True, False),
        (Owner(name="bakery", machine="there", file="/srv/b.py", folder="/srv"), True, True),
        (Owner(name="mill", machine="there", file="/srv/a.py", folder="/srv"), True, False),
        (Owner(name="bakery"), True, True),
        (Owner(name="mill"), True, False),
        # Two servers of one file.
        (Owner(name="mill", machine="here", file="/srv/a.py", folder="/srv", part="mill"), True, False),
        (Owner(name="bakery", machine="here", file="/srv/a.py", folder="/srv", part="bakery"), True, True),
    ],
)
def test_the_file_decides_on_one_machine_and_the_name_elsewhere(other: Owner, is_there: bool, expected: bool) -> None:
    assert A.is_same(other, exists=lambda file: is_there and file == A.file) is expected


def test_an_owner_is_read_as_it_was_written() -> None:
    assert Owner.decode(A.encode()) == A
    assert Owner.decode(b'{"name": "bakery", "of": "a newer release"}') == Owner(name="bakery")
    assert Owner.decode(b"null") is None
