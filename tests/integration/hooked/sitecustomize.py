"""Python runs this first wherever this folder is on PYTHONPATH: so the posts of a run under test can be held."""

import holding

holding.install()
