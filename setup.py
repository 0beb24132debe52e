"""What a package index shows: the README, whose links and pictures do not lead out of the repository there.

They lead to the address in KITAE_HOME where the build is given one, which ends in the version's files. Otherwise links
become their text, and pictures are left out: nothing on the index is dead.
"""

import os
import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?![a-z]+:|#)(?P<target>[^()\s]+)\)")


def described(readme: str, home: str) -> str:
    def moved(link: re.Match[str]) -> str:
        if home:
            return f"{link['picture']}[{link['text']}]({home.rstrip('/')}/{link['target']})"
        return "" if link["picture"] else link["text"]

    return LINK.sub(moved, readme)


if __name__ == "__main__":
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=described(text, os.environ.get("KITAE_HOME", "")),
        long_description_content_type="text/markdown",
    )
