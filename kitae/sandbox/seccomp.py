"""The filter of system calls in a sandbox, which refuses those that only attacks need."""

import functools
import os
import platform
import struct

# System calls: (x86-64, arm64). The first group would fail for lack of rights, or would evade the limits. The second is
# answered as by a kernel that does not know it, so that libraries use their alternative.
_LOOKS = ((101, 117), (310, 270), (311, 271), (438, 438), (312, 272))  # ptrace, process_vm_*, pidfd_getfd, kcmp
_REFUSED = (
    *_LOOKS,
    *((272, 97), (308, 268), (165, 40), (166, 39), (155, 41), (161, 51)),  # unshare, setns, mount*, pivot_root, chroot
    *((428, 428), (429, 429), (430, 430), (432, 432), (442, 442)),  # the new mount calls
    *((248, 217), (249, 218), (250, 219), (321, 280), (298, 241), (323, 282)),  # keyrings, bpf, perf, userfaultfd
    *((246, 104), (175, 105), (313, 273), (304, 265), (300, 262)),  # kexec, modules, open_by_handle_at, fanotify
    *((29, 194), (64, 190), (68, 186), (240, 180)),  # shared memory, semaphores and queues outside all limits
)
_UNKNOWN = ((319, 279), (447, 447), (425, 425), (426, 426), (427, 427), (435, 435))  # memfd*, io_uring*, clone3
# Limits, processors and priorities of a process (prlimit, sched_set*, move_pages): the first argument must be 0, as
# those of the checker are not the candidate's to change.
_OF_OTHERS = ((302, 261), (203, 122), (144, 119), (142, 118), (314, 274), (279, 239), (256, 238))
_CLONE, _SOCKET = (56, 220), (41, 198)
_NEW_NAMESPACES = 0x7E020000
_FAMILIES = (1, 2, 10)  # unix, IPv4, IPv6; not vsock, which no network namespace covers, nor kernel crypto, packets, …
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


@functools.cache
def _filter(only_looks: bool) -> bytes | None:
    """The seccomp program, in the kernel's BPF; None on other processors."""
    if platform.machine() not in _ARCHITECTURES:
        return None
    column, architecture = _ARCHITECTURES[platform.machine()]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026

    def one(code: int, value: int, hit: int = 0, miss: int = 0) -> bytes:
        return struct.pack("HBBI", code, hit, miss, value)

    program = [one(load, 4), one(equal, architecture, 1, 0), one(give, kill), one(load, 0)]
    program += [one(at_least, 0x40000000, 0, 1), one(give, kill)]  # the x32 calls, which have other numbers
    for calls, answer in ((_LOOKS, refuse),) if only_looks else ((_REFUSED, refuse), (_UNKNOWN, unknown)):
        for call in calls:
            program += [one(equal, call[column], 0, 1), one(give, answer)]
    if only_looks:
        return b"".join([*program, one(give, allow)])
    first_argument = 16
    for call in _OF_OTHERS:
        program += [one(equal, call[column], 0, 4), one(load, first_argument)]
        program += [one(equal, 0, 0, 1), one(give, allow), one(give, refuse)]
    program += [one(equal, _CLONE[column], 0, 4), one(load, first_argument)]
    program += [one(any_bit, _NEW_NAMESPACES, 0, 1), one(give, refuse), one(give, allow)]
    program += [one(equal, _SOCKET[column], 0, 2 + len(_FAMILIES)), one(load, first_argument)]
    program += [one(equal, family, len(_FAMILIES) - i, 0) for i, family in enumerate(_FAMILIES)]
    program += [one(give, refuse), one(give, allow)]
    return b"".join(program)


def filter_fd(*, only_looks: bool = False) -> int | None:
    """A file with the filter, open at its start; the caller closes it.

    only_looks: refuse nothing but looks into other processes, for programs that need the rest.
    """
    program = _filter(only_looks)
    if program is None:
        return None
    fd = os.memfd_create("seccomp")
    os.write(fd, program)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
