"""What a server says about tokens reaches the clients of the gateway with the gateway's own metadata."""

import pytest

from perdure._core.challenges import MAX_CHALLENGE, with_metadata

OWN = 'resource_metadata="https://a.example/.well-known/oauth-protected-resource/mcp"'
THEIRS = 'resource_metadata="http://10.0.0.5/.well-known/oauth-protected-resource"'


@pytest.mark.parametrize(
    ("challenge", "result"),
    [
        (f'Bearer error="invalid_token", {THEIRS}', f'Bearer error="invalid_token", {OWN}'),
        (f'Bearer {THEIRS}, scope="a b"', f'Bearer scope="a b", {OWN}'),
        (f'bearer realm="x", {THEIRS.replace(chr(34), "")}, scope=a', f'Bearer realm="x", scope=a, {OWN}'),
        (f"Bearer {THEIRS}", f"Bearer {OWN}"),
        ('Bearer scope="a"', f'Bearer scope="a", {OWN}'),
        ("Bearer", f"Bearer {OWN}"),
        ("", f"Bearer {OWN}"),
        ('Basic realm="x"', f"Bearer {OWN}"),
        ("Bearerish a=b", f"Bearer {OWN}"),
        ('Bearer realm="ü"', f"Bearer {OWN}"),
        ('Bearer realm="a\nb"', f"Bearer {OWN}"),
        (f"Bearer realm={'x' * (MAX_CHALLENGE - 13)}", f"Bearer realm={'x' * (MAX_CHALLENGE - 13)}, {OWN}"),
        (f"Bearer realm={'x' * (MAX_CHALLENGE - 12)}", f"Bearer {OWN}"),
    ],
)
def test_metadata_is_the_gateways_and_the_rest_the_servers(challenge: str, result: str) -> None:
    url = OWN.partition('"')[2].rstrip('"')
    assert with_metadata(challenge, url) == result
