//! The manuals of the subcommands of `aquifer vm`.

use crate::manual::Manual;

/// One manual for each subcommand, by its name.
pub(in crate::commands) const MANUALS: &[(&str, &Manual)] = &[
    ("create", &CREATE),
    ("start", &START),
    ("list", &LIST),
    ("show", &SHOW),
    ("resize", &RESIZE),
    ("set", &SET),
    ("rm", &RM),
    ("show-budget", &SHOW_BUDGET),
    ("set-budget", &SET_BUDGET),
    ("adopt", &ADOPT),
    ("forget", &FORGET),
    ("migrate", &MIGRATE),
    ("resume", &RESUME),
    ("stop", &STOP),
];

/// The part that all of them have in common.
const PART: Manual = Manual { see_also: &["aquifer-vm(1)"], ..Manual::NONE };

const CREATE: Manual = Manual {
    examples: &[
        ("aquifer vm create db --memory 8G --disk db.qcow2", "Define a VM and start it"),
        (
            "aquifer vm create db --memory 8G --no-start --restart always",
            "Define a VM that always runs, from the next boot on",
        ),
    ],
    notes: &[(
        "Agent",
        "The agent starts the VMs, at most two at a time, in order of their names. It tries again \
         1 s after a failure, then after 2 s, up to 60 s; after 10 minutes of running the wait is \
         1 s again. Without an agent nothing starts a VM but 'aquifer vm start'.",
    )],
    files: &[("/var/lib/aquifer/vms/NAME.toml", "the definition")],
    ..PART
};

const RM: Manual = Manual {
    examples: &[("aquifer vm rm db", "Remove the definition of a VM that is off")],
    ..PART
};

const START: Manual = Manual {
    examples: &[
        ("aquifer vm start db", "Start a VM by its definition"),
        (
            "aquifer vm start db --memory 8G --disk db.qcow2",
            "Start a VM whose cold memory leaves while this host is short",
        ),
        (
            "aquifer vm start db --memory 8G --cache 2G --lender nbds://b/ \
             --tls /etc/aquifer/tls",
            "Start a VM with its memory in the pool and at most 2 GiB of local RAM",
        ),
        (
            "aquifer vm start db --memory 8G -- -nic user,model=virtio",
            "Start a VM with one of QEMU's network cards",
        ),
        ("aquifer vm start web --group blue --memory 8G --disk web.qcow2", "Start a VM of a group"),
    ],
    ..PART
};

const LIST: Manual = Manual {
    examples: &[
        ("aquifer vm list", "List all VMs of this host"),
        ("aquifer vm list --all", "List ended VMs too"),
        ("aquifer vm list --json | jq -r '.[].name'", "Print only their names"),
    ],
    ..PART
};

const SHOW: Manual = Manual {
    examples: &[
        ("aquifer vm show db", "Show its state and where its memory is"),
        ("aquifer vm show db --json | jq -r .state", "Print only its state"),
    ],
    exit: &[("1", "also: the VM has ended; the answer says when and why")],
    ..PART
};

const RESIZE: Manual = Manual {
    examples: &[
        ("aquifer vm resize db --memory 12G", "Grow or shrink it to 12 GiB"),
        ("aquifer vm resize db --memory 4G --stages", "Shrink it and print how long stages took"),
    ],
    exit: &[("1", "also: the guest stopped short of the size; the answer has the size reached")],
    ..PART
};

const SET: Manual = Manual {
    examples: &[
        (
            "aquifer vm set db --min 4G --max 16G --weight 2",
            "Limit what a balancer gives and takes",
        ),
        ("aquifer vm set db --cpus 4 --autostart=false", "Change its definition"),
    ],
    ..PART
};

const SHOW_BUDGET: Manual = Manual {
    examples: &[("aquifer vm show-budget", "Show the budget and each VM's share")],
    ..PART
};

const SET_BUDGET: Manual = Manual {
    examples: &[("aquifer vm set-budget --memory 48G", "Give all VMs together at most 48 GiB")],
    ..PART
};

const ADOPT: Manual = Manual {
    examples: &[
        ("aquifer vm adopt old --qmp /run/old/qmp", "Resize a VM that another program started"),
        (
            "aquifer vm adopt old --qmp /run/old/qmp --agent /run/old/agent",
            "Adopt it together with its guest agent",
        ),
    ],
    ..PART
};

const FORGET: Manual = Manual {
    examples: &[("aquifer vm forget old", "Leave an adopted VM to its owner; it keeps running")],
    ..PART
};

const MIGRATE: Manual = Manual {
    examples: &[
        ("aquifer vm migrate db --to c", "Migrate it to host c, a peer of this host"),
        ("aquifer vm migrate db --to c --bandwidth 100M", "Send at most 100 MiB a second"),
        ("aquifer vm migrate db --cancel", "Cancel its migration; it stays here"),
    ],
    ..PART
};

const RESUME: Manual = Manual {
    examples: &[
        ("aquifer vm resume db", "Resume a paused VM"),
        ("aquifer vm resume db --force", "Resume a VM whose other host is gone for good"),
    ],
    ..PART
};

const STOP: Manual = Manual {
    examples: &[
        ("aquifer vm stop db", "Ask its guest to power itself off, and wait at most 60 s"),
        ("aquifer vm stop db --force", "End it at once"),
    ],
    ..PART
};
