"""The variables that a foreign program finds in its environment: an allow-list, as ours may hold keys and tokens."""

import os
from collections.abc import Mapping, Sequence

_NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
_PREFIX = "LC_"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def program_variables(pass_on: Sequence[str] = (), given: Mapping[str, str] | None = None) -> dict[str, str]:
    """What every program needs, the variables of ours that the recipe names, and those that it gives.

    The address of a proxy is passed on unless it holds a password.
    """
    found = {name: text for name, text in os.environ.items() if _is_plain(name, text) or name in pass_on}
    return {**found, **(given or {})}


def _is_plain(name: str, text: str) -> bool:
    plain = name in (*_NEEDED, *_CERTIFICATES) or name.startswith(_PREFIX)
    return plain or (name.lower() in _PROXIES and "@" not in text)
