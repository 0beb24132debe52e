"""What a keeper gives its process."""

from kitae.workers.ray.actor import environment_of


def test_gpus_are_not_hidden_from_a_process_that_was_assigned_none() -> None:
    assert environment_of({"CUDA_VISIBLE_DEVICES": "", "RAY_JOB_ID": "1", "HOME": "/"}, []) == {"HOME": "/"}
    for shown in ({"CUDA_VISIBLE_DEVICES": "2,3"}, {}):
        assert environment_of(shown, []) == shown
    assert environment_of({"CUDA_VISIBLE_DEVICES": "1"}, [1]) == {"CUDA_VISIBLE_DEVICES": "1"}
