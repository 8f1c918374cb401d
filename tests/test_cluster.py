"""Who the hosts are."""

import json

import pytest

from launcher.errors import LaunchError
from launcher.job.cluster import read_cluster
from launcher.result.causes import of_error

TWO = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "0"}
GROUPS_OF = "SM_INSTANCE_GROUPS_DICT"
GROUPS = {
    "SM_HOSTS": '["algo-1", "algo-2", "algo-3"]',
    "SM_CURRENT_HOST": "algo-3",
    GROUPS_OF: json.dumps(
        {
            "data": {"instance_group_name": "data", "hosts": ["algo-1"]},
            "train": {"instance_group_name": "train", "hosts": ["algo-3", "algo-2"]},
        }
    ),
}


def refusal(environ, groups=()):
    with pytest.raises(LaunchError) as caught:
        read_cluster(environ, groups)
    assert of_error(caught.value).exit_code == 2
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


def test_hosts_are_sorted_as_strings_whatever_order_they_come_in():
    names = [f"algo-{n}" for n in range(12, 0, -1)]
    environ = {**TWO, "SM_HOSTS": json.dumps(names), "TRAINING_JOB_NAME": "job"}
    cluster = read_cluster(environ)
    assert cluster.hosts[:4] == ("algo-1", "algo-10", "algo-11", "algo-12")
    assert (cluster.nnodes, cluster.node_rank, cluster.job_name) == (12, 4, "job")


LIST = "expected a JSON list"
OBJECT = "expected a JSON object of groups with hosts among algo-1, "
REFUSED = [
    ({"SM_HOSTS": "algo-1,algo-2"}, LIST),  # not JSON
    ({"SM_HOSTS": '{"algo-1": 1}'}, LIST),
    ({"SM_HOSTS": "[]"}, LIST),
    ({"SM_HOSTS": '["algo-1", "algo-1"]'}, LIST),
    ({"SM_HOSTS": '["algo-1", 2]'}, LIST),
    ({"SM_HOSTS": '["algo-1", "a b"]'}, LIST),  # no host name
    ({"SM_HOSTS": "[" * 5000}, LIST),  # too deep for the JSON parser
    (
        {"SM_CURRENT_HOST": "algo-3"},
        "SM_CURRENT_HOST is 'algo-3', but SM_HOSTS names algo-1, algo-2; expected one of them.",
    ),
    ({"SM_CURRENT_HOST": None}, "SM_CURRENT_HOST is not set"),
    ({"SM_HOSTS": json.dumps([f"host-{n}" for n in range(1000)])}, "and 992 more; expected one"),
    ({"SM_HOSTS": json.dumps([f"{n}{'x' * 240}" for n in range(1000)])}, "and 998 more; expected"),
    *(
        ({name: count}, f"{name} is {count!r}; expected a whole number")
        for name in ("SM_NUM_GPUS", "SM_NUM_NEURONS")
        for count in ("-1", "two", "\uff11")
    ),
    ({"SM_NUM_GPUS": "8", "CUDA_VISIBLE_DEVICES": "1,2,01"}, "is '1,2,01'; expected each GPU once"),
    ({"TRAINING_JOB_NAME": "a/b"}, "TRAINING_JOB_NAME is 'a/b'"),
    ({"SAGEMAKER_JOB_NAME": "a/b"}, "SAGEMAKER_JOB_NAME is 'a/b'"),
    ({**GROUPS, GROUPS_OF: "x"}, f"is 'x'; {OBJECT}"),
    ({**GROUPS, GROUPS_OF: '{"train": 1}'}, OBJECT),
    ({**GROUPS, GROUPS_OF: '{"train": {"hosts": []}}'}, OBJECT),
    ({**GROUPS, GROUPS_OF: '{"train": {"hosts": ["algo-9"]}}'}, OBJECT),
]


@pytest.mark.parametrize(("environ", "says"), REFUSED)
def test_what_is_refused(environ, says):
    groups = ["train"] if GROUPS_OF in environ else []
    environ = {name: value for name, value in {**TWO, **environ}.items() if value is not None}
    assert says in refusal(environ, groups)


@pytest.mark.parametrize(
    ("there", "visible", "gpus"),
    [
        ("8", None, 8),  # not limited
        ("8", "", 0),  # hidden
        ("8", "-1", 0),  # the usual way to hide them
        ("8", "0,-1,2", 1),  # nothing behind an invalid one is seen
        ("8", "7,8", 1),  # there is no ninth
        ("8", "0," + "9" * 5000, 1),  # nor one of 5,000 digits
        ("8", "GPU-8932f937,GPU-1", 2),  # by UUID
        ("0", "GPU-1", 0),
    ],
)
def test_cuda_visible_devices_limits_the_gpus(there, visible, gpus):
    environ = {**TWO, "SM_NUM_GPUS": there}
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    assert read_cluster(environ).num_gpus == gpus


MIXED = """\
GPU 0: NVIDIA A100 (UUID: GPU-0a)
  MIG 3g.20gb     Device  0: (UUID: MIG-a1)
  MIG 3g.20gb Device 1: (UUID: MIG-GPU-0a/2/0)
GPU 1: NVIDIA H100 (UUID: GPU-1b)
GPU 2: NVIDIA A100 (UUID: GPU-2c)
"""


@pytest.mark.parametrize("known", ["", "3"], ids=["counted here", "by the toolkit"])
@pytest.mark.parametrize(
    ("visible", "gpus", "mig", "models"),
    [
        (None, 1, 4, "A100 H100"),  # one slice hides all that is no slice
        ("MIG-a1,MIG-GPU-0a/2/0", 1, 2, ""),
        ("MIG-GPU-0a/1/0", 1, 1, ""),
        ("0", 1, 2, "A100"),
        ("GPU-0", 1, 2, "A100"),  # CUDA takes the beginning of a UUID
        ("1,0", 1, 3, "H100 A100"),
        ("1,2", 2, 0, "H100 A100"),  # no slice is visible
        ("", 0, 0, ""),
    ],
)
def test_of_mig_slices_a_process_sees_one(program, known, visible, gpus, mig, models):
    environ = {**TWO, "SM_NUM_GPUS": known, **program("nvidia-smi", f"cat <<X\n{MIXED}X")}
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    cluster = read_cluster(environ)
    assert (cluster.num_gpus, cluster.mig) == (gpus, mig)
    assert cluster.gpu_models == tuple(f"NVIDIA {model}" for model in models.split())


def test_the_driver_is_asked_for_slices_only_where_a_gpu_is_visible(program, logged):
    environ = {**TWO, **program("nvidia-smi", "exit 9")}
    assert read_cluster({**environ, "SM_NUM_GPUS": "0"}).num_gpus == 0
    hidden = {**environ, "SM_NUM_GPUS": "8", "CUDA_VISIBLE_DEVICES": ""}
    assert (read_cluster(hidden).num_gpus, logged()) == (0, "")
    seen = read_cluster({**environ, "SM_NUM_GPUS": "8"})
    assert (seen.num_gpus, seen.mig) == (8, 0)
    assert "nvidia-smi -L failed" in (said := logged()) and "without its list" in said


def test_neuron_cores_are_counted_by_the_toolkit_or_here(program):
    environ = {**TWO, **program("neuron-ls", """echo '[{"nc_count": 2}]'""")}
    assert read_cluster(environ).num_neurons == 2
    assert read_cluster({**environ, "SM_NUM_NEURONS": "4"}).num_neurons == 4


def test_the_name_of_a_job_is_the_same_on_every_host():
    theirs = {**TWO, "SAGEMAKER_JOB_NAME": "b"}
    assert read_cluster({**theirs, "TRAINING_JOB_NAME": "a"}).job_name == "a"
    assert read_cluster({**theirs, "TRAINING_JOB_NAME": ""}).job_name == "b"
    unnamed = {**TWO, "SAGEMAKER_JOB_NAME": ""}
    other = {**unnamed, "SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-2", "algo-1"]'}
    assert read_cluster(unnamed).job_name == read_cluster(other).job_name != ""


def test_instance_groups():
    chosen = read_cluster(GROUPS, ["train"])
    assert chosen.hosts == ("algo-2", "algo-3")
    assert chosen.node_rank == 1
    assert read_cluster(GROUPS, ["data"]).hosts == ("algo-1",)
    assert read_cluster(GROUPS, ["data", "train"]).nnodes == 3
    assert read_cluster(GROUPS).nnodes == 3
    assert chosen.job_name == read_cluster(GROUPS).job_name
    says = "is 'gpu'; expected names of this cluster's instance groups: data, train"
    assert says in refusal(GROUPS, ["gpu"])


def test_a_host_without_any_description_is_alone():
    cluster = read_cluster({})
    assert (cluster.hosts, cluster.node_rank) == (("localhost",), 0)
    assert read_cluster({"SM_CURRENT_HOST": "here"}).hosts == ("here",)
