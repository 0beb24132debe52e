"""What runs inside the sandbox: `warden` is its first process, `candidate` and `checker` the two ends of a `wire`,
`usage` says what they use. `port`, `remotes` and `precautions` are the checker's. `console` runs code cell by cell.

These modules are sent to a bare interpreter as code and not as files, so they import nothing but C modules that start
in no time, and each other. `MODULES` names them in the order in which they can be loaded.
"""

MODULES = ("usage", "wire", "candidate", "remotes", "port", "precautions", "checker", "console", "warden")
