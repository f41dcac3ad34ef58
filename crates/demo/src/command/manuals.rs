//! The manuals of the subcommands of `aquifer demo`.

use aquifer_cli::manual::Manual;

/// One manual for each subcommand, by its name.
pub(super) const MANUALS: &[(&str, &Manual)] = &[
    ("cluster", &CLUSTER),
    ("sharing", &SHARING),
    ("region", &REGION),
    ("migrate", &MIGRATE),
    ("resize", &RESIZE),
    ("groups", &GROUPS),
];

/// The part that all of them have in common.
const PART: Manual = Manual { see_also: &["aquifer-demo(1)"], ..Manual::NONE };

const CLUSTER: Manual = Manual {
    examples: &[
        ("aquifer demo cluster", "Print the figures and all decisions as text"),
        ("aquifer demo cluster --picture cluster.png", "Plot the memory of all hosts over time"),
    ],
    ..PART
};

const SHARING: Manual = Manual {
    examples: &[
        ("aquifer demo sharing", "Print the figures as text"),
        ("aquifer demo sharing --picture sharing.png", "Plot RAM and swap of both hosts over time"),
    ],
    ..PART
};

const REGION: Manual = Manual {
    examples: &[("aquifer demo region --picture region.png", "Plot a histogram of fetch times")],
    ..PART
};

const MIGRATE: Manual = Manual {
    examples: &[(
        "aquifer demo migrate --picture migrate.png",
        "Plot times and bytes, beside QEMU's",
    )],
    ..PART
};

const RESIZE: Manual = Manual {
    examples: &[
        ("aquifer demo resize --picture resize.png", "Plot times and memory"),
        ("aquifer demo resize --pool", "Put the guest's memory into the pool"),
    ],
    ..PART
};

const GROUPS: Manual = Manual {
    examples: &[("aquifer demo groups --picture groups.png", "Plot the savings of the groups")],
    ..PART
};
