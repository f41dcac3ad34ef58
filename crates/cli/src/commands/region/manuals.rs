//! The manuals of the subcommands of `aquifer region`.

use crate::manual::Manual;

/// One manual for each subcommand, by its name.
pub(in crate::commands) const MANUALS: &[(&str, &Manual)] = &[
    ("create", &CREATE),
    ("list", &LIST),
    ("show", &SHOW),
    ("show-pages", &SHOW_PAGES),
    ("resize", &RESIZE),
    ("show-limits", &SHOW_LIMITS),
    ("set-limit", &SET_LIMIT),
    ("persist", &PERSIST),
    ("drop", &DROP),
    ("recover", &RECOVER),
    ("rm", &RM),
    ("exec", &EXEC),
];

/// The part that all of them have in common.
const PART: Manual = Manual { see_also: &["aquifer-region(1)"], ..Manual::NONE };

const CREATE: Manual = Manual {
    examples: &[(
        "aquifer region create items --size 4G --cache 1G \
         --lender nbds://b/ --tls /etc/aquifer/tls",
        "Create 4 GiB of memory with at most 1 GiB of local RAM",
    )],
    ..PART
};

const LIST: Manual = Manual {
    examples: &[
        ("aquifer region list", "List all regions of this host"),
        ("aquifer region list --json | jq -r '.[].name'", "Print only their names"),
    ],
    ..PART
};

const SHOW: Manual = Manual {
    examples: &[
        ("aquifer region show items", "Show where its pages are and how long faults take"),
        ("aquifer region show items --json | jq .waiting", "Count faults that wait for a lender"),
    ],
    ..PART
};

const SHOW_PAGES: Manual = Manual {
    examples: &[
        ("aquifer region show-pages items", "Show where every page is"),
        (
            "aquifer region show-pages items --first 0 --count 256 --json",
            "Print where its first MiB is, as JSON",
        ),
    ],
    ..PART
};

const RESIZE: Manual = Manual {
    examples: &[
        ("aquifer region resize items --cache 512M", "Keep at most 512 MiB of it in local RAM"),
        ("aquifer region resize db --cache 4G", "Keep at most 4 GiB of VM 'db' in local RAM"),
    ],
    ..PART
};

const SHOW_LIMITS: Manual = Manual {
    examples: &[("aquifer region show-limits", "Show the limits and each region's part")],
    ..PART
};

const SET_LIMIT: Manual = Manual {
    examples: &[
        ("aquifer region set-limit --cache 8G", "Limit all caches of this host together to 8 GiB"),
        ("aquifer region set-limit --cache none", "Remove the common limit"),
    ],
    ..PART
};

const PERSIST: Manual = Manual {
    examples: &[("aquifer region persist items", "Write every dirty page to the lenders")],
    ..PART
};

const DROP: Manual = Manual {
    examples: &[
        ("aquifer region drop items", "Zero all of it"),
        ("aquifer region drop items --first 0 --count 256", "Zero its first MiB"),
    ],
    ..PART
};

const RECOVER: Manual = Manual {
    examples: &[("aquifer region recover items", "Serve a region whose processes were killed")],
    ..PART
};

const RM: Manual = Manual {
    examples: &[("aquifer region rm items", "Remove a region that no program maps")],
    ..PART
};

const EXEC: Manual = Manual {
    examples: &[
        (
            "aquifer region exec -- memcached -u root -m 4096 -e /run/aquifer/regions/items",
            "Run a program that maps a file",
        ),
        (
            "aquifer region exec --heap items -- redis-server --save ''",
            "Run an unmodified program with its heap in the region",
        ),
    ],
    exit: &[("N", "the program's own exit code: it replaces this command")],
    ..PART
};
