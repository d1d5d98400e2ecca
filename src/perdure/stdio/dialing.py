"""The HTTP client of a bridge, in whatever environment the host starts it."""

from __future__ import annotations

import httpx2

from perdure.remote.auth import Bearer, TokenProvider
from perdure.remote.old_wire import LIMITS, TIMEOUT, past_proxies
from perdure.stdio.failures import Refused, Trouble


def http_client(url: str, token: TokenProvider | None) -> httpx2.AsyncClient:
    """Raises `Refused` where the environment names proxies or certificates that cannot be used."""
    address = httpx2.URL(url)
    try:
        return httpx2.AsyncClient(
            mounts=past_proxies(url),
            auth=None if token is None else Bearer(token),
            timeout=TIMEOUT,
            limits=LIMITS,
            # Loading the certificates takes longer than all else here; redirects to another scheme are not followed.
            # The scheme as it is understood, not as it is spelled: HTTPS is https.
            verify=address.scheme != "http",
        )
    except OSError as error:
        sentence = f"the certificates that are trusted (SSL_CERT_FILE) cannot be read: {error.strerror or error}"
        raise Refused(Trouble(reason="bad_certificates", sentence=sentence)) from error
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        sentence = f"the proxy that the environment names cannot be used: {_first_line(error)}"
        raise Refused(Trouble(reason="bad_proxy", sentence=sentence)) from error


def _first_line(error: Exception) -> str:
    """Not all of it: some libraries add advice."""
    return str(error).partition("\n")[0].partition(". ")[0]
