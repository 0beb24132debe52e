"""What an actor gives its process."""

import pytest

from kitae.workers.ray.actor import environment_of


@pytest.mark.parametrize("before", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "2,3"}])
def test_a_process_sees_the_gpus_that_it_was_assigned_and_no_others(before: dict[str, str]) -> None:
    given = {**before, "RAY_JOB_ID": "1", "HOME": "/"}
    assert environment_of(given, []) == {"HOME": "/", "CUDA_VISIBLE_DEVICES": ""}
    assert environment_of(given, [1, 3]) == {"HOME": "/", "CUDA_VISIBLE_DEVICES": "1,3"}
