//! The manuals of the subcommands of `aquifer vm`.

use crate::manual::Manual;

/// One manual for each subcommand, by its name.
pub(in crate::commands) const MANUALS: &[(&str, &Manual)] = &[
    ("start", &START),
    ("list", &LIST),
    ("show", &SHOW),
    ("resize", &RESIZE),
    ("set", &SET),
    ("budget", &BUDGET),
    ("balance", &BALANCE),
    ("adopt", &ADOPT),
    ("release", &RELEASE),
    ("migrate", &MIGRATE),
    ("resume", &RESUME),
    ("stop", &STOP),
];

/// The part that all of them have in common.
const PART: Manual = Manual { see_also: &["aquifer-vm(1)"], ..Manual::NONE };

const START: Manual = Manual {
    examples: &[
        (
            "aquifer vm start db --memory 8G --disk db.qcow2",
            "A VM whose memory is RAM of this host",
        ),
        (
            "aquifer vm start db --memory 8G --cache 2G --lender nbds://b.example.org/ --tls /etc/aquifer/tls --disk db.qcow2 -- -nic user,model=virtio",
            "A VM with at most 2 GiB of local RAM, and a network card of QEMU's own",
        ),
        (
            "aquifer vm start web --group blue --memory 8G --cache 2G --lender nbds://b.example.org/ --tls /etc/aquifer/tls",
            "A VM of a group",
        ),
    ],
    ..PART
};

const LIST: Manual = Manual {
    examples: &[
        ("aquifer vm list", "All VMs of this host"),
        ("aquifer vm list --json | jq -r '.[].name'", "Only their names"),
    ],
    ..PART
};

const SHOW: Manual = Manual {
    examples: &[
        ("aquifer vm show db", "Whether it runs, and where its memory is"),
        ("aquifer vm show db --json | jq -r .state", "Only its state"),
    ],
    ..PART
};

const RESIZE: Manual = Manual {
    examples: &[
        ("aquifer vm resize db 12G", "Grow or shrink it to 12 GiB"),
        ("aquifer vm resize db --cache 4G", "Keep at most 4 GiB of it in local RAM"),
    ],
    exit: &[("1", "also: the guest kept more than it was to keep; the answer says how much")],
    ..PART
};

const SET: Manual = Manual {
    examples: &[(
        "aquifer vm set db --min 4G --max 16G --weight 2",
        "What a balancer keeps it within",
    )],
    ..PART
};

const BUDGET: Manual = Manual {
    examples: &[
        ("aquifer vm budget", "What is set aside for guests, and who has it"),
        ("aquifer vm budget 48G", "Set 48 GiB aside"),
    ],
    ..PART
};

const BALANCE: Manual = Manual {
    examples: &[
        ("aquifer vm balance", "Move memory to the VMs that need it"),
        ("aquifer vm balance --dry-run --periods 1", "Only say once what it would do"),
    ],
    ..PART
};

const ADOPT: Manual = Manual {
    examples: &[
        ("aquifer vm adopt old --qmp /run/old/qmp", "Resize a VM that another program started"),
        (
            "aquifer vm adopt old --qmp /run/old/qmp --agent /run/old/agent",
            "Likewise, and hear the agent in its guest",
        ),
    ],
    ..PART
};

const RELEASE: Manual = Manual {
    examples: &[("aquifer vm release old", "Leave an adopted VM to its owner; it runs on")],
    ..PART
};

const MIGRATE: Manual = Manual {
    examples: &[
        ("aquifer vm migrate db --to c", "Move it to host c, a peer of this one"),
        ("aquifer vm migrate db --to c --bandwidth 100M", "Send at most 100 MiB a second"),
        ("aquifer vm migrate db --cancel", "Keep a VM that is being moved here"),
    ],
    ..PART
};

const RESUME: Manual = Manual {
    examples: &[
        ("aquifer vm resume db", "Let a paused VM run"),
        (
            "aquifer vm resume db --force",
            "Likewise, when the host that may have it is lost for ever",
        ),
    ],
    ..PART
};

const STOP: Manual = Manual {
    examples: &[
        ("aquifer vm stop db", "Ask its guest to power itself off, and wait 60 s at most"),
        ("aquifer vm stop db --force", "Pull its plug"),
    ],
    ..PART
};
