"""What runs inside the sandbox. `warden` is its first process; `candidate` and `checker` are the two ends of a `wire`;
`usage` measures resources; `failures`, `port`, `remotes` and `precautions` belong to the checker; `console` runs code
cell by cell.

These modules are sent to a bare interpreter as code and not as files, so they import only each other and C modules that
load fast. `MODULES` names those that every sandbox loads at once, in an order in which they can be loaded; `LATER` what
one mode of a warden loads beside them. The tests' side is loaded after the fork: the candidate has none of it, and
loads its own code meanwhile.
"""

MODULES = ("usage", "wire", "candidate", "warden")
LATER = {"check": ("failures", "remotes", "port", "precautions", "checker"), "console": ("console",)}
