"""JSON Schemas of a machine and of what it was measured to do: a part of kvctl.profile/1."""

from __future__ import annotations

from schema_parts import STRINGS, flag, listed, maybe, number, obj, of, text, whole

CPU = obj(
    "The processor; null is not known.",
    {
        "model": maybe(text("Its name.")),
        "architecture": text("x86_64, aarch64 …"),
        "physical_cores": maybe(whole("Cores.")),
        "logical_cores": maybe(whole("Threads that they run at once.")),
        "allowed_cores": maybe(whole("Logical cores that this process may use by its affinity.")),
        "quota_cores": maybe(number("Processor time a second that a cgroup allows; null without a limit.")),
        "instruction_sets": listed("Those that matter to matrix products.", STRINGS),
        "last_cache_bytes": maybe(whole("Bytes of all last-level caches together.")),
        "mhz": maybe(number("Clock as read, in MHz.")),
        "max_mhz": maybe(number("Highest clock, in MHz.")),
        "governor": maybe(text("What steers the clock.")),
        "usable_cores": of("integer", "Threads that can run at once here.", minimum=1),
    },
)

HOST_MEMORY = obj(
    "The host's memory.",
    {
        "total_bytes": whole("All bytes."),
        "available_bytes": whole("Bytes that could be taken without swapping, within the cgroup's limit."),
        "swap_total_bytes": whole("Bytes of swap."),
        "swap_free_bytes": whole("Bytes of swap that are free."),
        "limit_bytes": maybe(whole("Bytes that the tightest cgroup allows; null without a limit.")),
        "limit_name": maybe(text("Which limit that is.")),
        "limit_used_bytes": maybe(whole("Bytes used under it, without the file cache that the kernel gives back.")),
    },
)

READINGS = maybe(
    obj(
        "What its sensors say; null where the driver does not tell.",
        {
            "sm_mhz": maybe(number("Clock of the multiprocessors, in MHz.")),
            "max_sm_mhz": maybe(number("Its highest, in MHz.")),
            "memory_mhz": maybe(number("Clock of the memory, in MHz.")),
            "max_memory_mhz": maybe(number("Its highest, in MHz.")),
            "power_watts": maybe(number("Power, in watts.")),
            "power_limit_watts": maybe(number("The limit in force, in watts.")),
            "temperature_c": of(["number", "null"], "Temperature, in °C."),
            "persistence": maybe(flag("Whether the driver stays loaded between processes.")),
            "slowed_by": listed("What holds the clocks down.", STRINGS),
        },
    )
)

GPU = obj(
    "One GPU or MIG slice; null is not told.",
    {
        "name": text("The driver's name for it."),
        "index": maybe(whole("The driver's number for it.")),
        "uuid": maybe(text("The driver's identifier.")),
        "mig": flag("Whether it is a slice of a card."),
        "unreadable": maybe(text("Why nothing is known of it.")),
        "memory_bytes": whole("All bytes."),
        "usable_bytes": whole("Bytes that applications see."),
        "usable_estimated": flag("Whether a rule gives these."),
        "free_bytes": maybe(whole("Bytes that are free.")),
        "used_by_others_bytes": whole("Bytes that other processes hold, as far as they are told."),
        "holders": listed(
            "Other processes on it.",
            obj(
                "One process.",
                {
                    "pid": whole("Its process id."),
                    "bytes": maybe(whole("Bytes that it holds.")),
                    "name": maybe(text("Its name.")),
                    "user": maybe(text("Whose it is.")),
                },
            ),
        ),
        "compute_capability": maybe(text("CUDA compute capability.")),
        "pcie": maybe(text("The link to the host: gen 5 x16.")),
        "nvlinks": maybe(whole("Active NVLinks.")),
        "nvlink_peers": listed("Numbers of the GPUs that NVLink joins it to.", whole("A number.")),
        "driver": maybe(text("The driver's version.")),
        "cuda_version": maybe(text("The CUDA version that it supports.")),
        "card": maybe(text("The card's name in kvctl's table.")),
        "published_bandwidth_gbs": maybe(number("Memory bandwidth by the maker, 10^9 bytes a second.")),
        "published_fp16_tflops": maybe(number("Dense 16-bit products by the maker, 10^12 operations a second.")),
        "readings": READINGS,
        "notes": listed("What to know about it.", STRINGS),
    },
)

RATE = obj(
    "One thing measured again and again; the fastest run counts.",
    {
        "what": text("What was done.", "read", "copy", "sum", "matvec", "matmul"),
        "dtype": maybe(text("In which dtype, as torch names it.")),
        "bytes_per_second": number("Bytes a second, of all but matmul."),
        "flops_per_second": number("Floating-point operations a second, of matmul."),
        "spread": number("How much longer the middle run took, as a share of the fastest."),
        "runs": of("integer", "Runs.", minimum=1),
        "seconds": number("Seconds spent on it."),
        "ran": text("What ran, in words."),
    },
    optional=("bytes_per_second", "flops_per_second"),
) | {"oneOf": [{"required": ["bytes_per_second"]}, {"required": ["flops_per_second"]}]}

RATES = obj(
    "What one device was measured to do.",
    {
        "device": text("The device as torch names it."),
        "bandwidth_bytes_per_second": maybe(number("Memory bandwidth: the highest of all ways to move bytes.")),
        "published_bytes_per_second": maybe(number("Memory bandwidth by the maker, bytes a second.")),
        "published_flops_per_second": maybe(number("Dense 16-bit products by the maker, operations a second.")),
        "memory": listed("Ways to move bytes.", RATE),
        "matrix": listed("Matrix products.", RATE),
        "notes": listed("What was left out, and why.", STRINGS),
    },
)

MACHINE = maybe(
    obj(
        "This machine, where it was looked at: without MODEL.",
        {
            "cpu": CPU,
            "memory": HOST_MEMORY,
            "gpus": listed("Its GPUs.", GPU),
            "no_gpu": maybe(text("Why there are none.")),
            "load_average": maybe(
                listed("Running processes over 1, 5 and 15 minutes.", number("Processes."), minItems=3, maxItems=3)
            ),
            "rates": listed("What its devices were measured to do.", RATES),
        },
    )
)
