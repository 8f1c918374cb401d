"""Which GPUs are broken, by what `nvidia-smi -q` says. No GPU was at hand: the reports are written
after ones that drivers of several generations print (470, 535, 550, 570), shortened.
"""

import pytest

from launcher.job.gpu_health import broken

HEAD = """
==============NVSMI LOG==============

Timestamp                                 : Tue Nov 24 10:00:00 2026
Driver Version                            : 570.133.20
CUDA Version                              : 12.8

Attached GPUs                             : 2
"""
GPU = """\
GPU 00000000:{at}:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    Serial Number                         : 1652823054567
    GPU UUID                              : {uuid}
    GPU Virtualization Mode
        Virtualization Mode               : None
    GPU Reset Status
        Reset Required                    : {reset}
        Drain and Reset Recommended       : {drain}
{action}    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 7
            SRAM Uncorrectable Parity     : {parity}
            SRAM Uncorrectable SEC-DED    : 0
            DRAM Correctable              : 12
            DRAM Uncorrectable            : {dram}
        Aggregate
            SRAM Correctable              : 0
            SRAM Uncorrectable Parity     : {life}
            DRAM Uncorrectable            : {life}
        Aggregate Uncorrectable SRAM Sources
            SRAM L2                       : {life}
    Retired Pages
        Double Bit ECC                    : N/A
    Remapped Rows
        Uncorrectable Error               : {life}
        Pending                           : No
"""
VOLTA = """\
GPU 00000000:00:1B.0
    GPU UUID                              : GPU-v1
    Ecc Mode
        Current                           : Enabled
    ECC Errors
        Volatile
            Single Bit
                Device Memory             : 3
                Total                     : 3
            Double Bit
                Device Memory             : {double}
                Total                     : {double}
        Aggregate
            Double Bit
                Device Memory             : 4
                Total                     : 4
"""


def gpu(at="53", uuid="GPU-5a", action="None", **what):
    known = {"reset": "No", "drain": "No", "parity": "0", "dram": "0", "life": "0", **what}
    line = f"    GPU Recovery Action                   : {action}\n" if action else ""
    return GPU.format(at=at, uuid=uuid, action=line, **known)


def of_two(**second):
    """What a host says whose first GPU is well."""
    return HEAD + gpu() + gpu(at="64", uuid="GPU-64", **second)


ECC = "has uncorrectable ECC errors"
LOST = "Unable to determine the device handle for GPU 0000:64:00.0: GPU is lost.  Reboot the system"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (of_two(), ""),
        (of_two(dram="1"), f"GPU 1 (GPU-64) {ECC}"),
        (of_two(parity="2", action=""), f"GPU 1 (GPU-64) {ECC}"),
        (of_two(action="Reset"), "GPU 1 (GPU-64) needs a recovery action (Reset)"),
        (of_two(action="Reboot"), "GPU 1 (GPU-64) needs a recovery action (Reboot)"),
        (of_two(action="Drain P2P"), "GPU 1 (GPU-64) needs a recovery action (Drain P2P)"),
        (
            of_two(action="Drain and Reset", dram="1"),
            f"GPU 1 (GPU-64) {ECC} and needs a recovery action (Drain and Reset)",
        ),
        (
            of_two(action="", reset="Yes"),
            "GPU 1 (GPU-64) needs a recovery action (Reset Required)",
        ),
        (
            of_two(action="", drain="Yes"),
            "GPU 1 (GPU-64) needs a recovery action (Drain and Reset Recommended)",
        ),
        # What is not known, is of the GPU's whole life, or was corrected, is no reason.
        (of_two(action="N/A", dram="N/A", parity="[N/A]"), ""),
        (of_two(action="Requested functionality has been deprecated"), ""),
        (of_two(action="", life="9"), ""),
        (of_two(dram="-1"), ""),
        # Up to Volta errors are of one bit or two.
        (HEAD + VOLTA.format(double=0), ""),
        (HEAD + VOLTA.format(double=1), f"GPU 0 (GPU-v1) {ECC}"),
        # Several; a GPU that is gone.
        (
            HEAD + 2 * gpu(dram="1") + gpu(action="Reset"),
            f"GPU 0 (GPU-5a) {ECC}, and 2 more of its GPUs are broken",
        ),
        (of_two(dram="GPU is lost"), "GPU 1 (GPU-64) is lost"),
        (HEAD + gpu() + f"{LOST} to recover this GPU\n", "GPU 0000:64:00.0 is lost"),
        (LOST.replace("GPU 0000", "GPU1: 0000"), "GPU 0000:64:00.0 is lost"),
        # What else it says, or something else.
        ("Failed to initialize NVML: Driver/library version mismatch\n", ""),
        ("No devices were found\n", ""),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", ""),
        ("ERROR: Option -q is not recognized. Please run 'nvidia-smi -h'.\n", ""),
        (of_two(dram="1")[:-700], ""),  # cut before that
        ("DRAM Uncorrectable : 1\nGPU Recovery Action : Reset\n", ""),  # of no GPU
        ("\x00\x1b:\n: :\n\n GPU\n", ""),
        ("", ""),
    ],
)
def test_what_is_broken(text, says):
    assert broken(text, {}) == says


@pytest.mark.parametrize(
    ("visible", "is_said"),
    [
        ("0,1", True),
        (" 1 ", True),
        ("GPU-64", True),
        ("GPU-6", True),  # CUDA takes the beginning of one
        ("MIG-8f1e", True),  # a slice, of some GPU
        ("0", False),
        ("GPU-5a", False),
        ("", True),  # a script may set it
        ("-1", True),
    ],
)
def test_gpus_that_ranks_do_not_see_do_not_count(visible, is_said):
    said = broken(of_two(dram="1"), {"CUDA_VISIBLE_DEVICES": visible})
    assert said == (f"GPU 1 (GPU-64) {ECC}" if is_said else "")


def test_a_lost_gpu_of_which_only_its_address_is_known_may_be_one_that_ranks_do_not_see():
    assert broken(LOST, {"CUDA_VISIBLE_DEVICES": "0"}) == ""
