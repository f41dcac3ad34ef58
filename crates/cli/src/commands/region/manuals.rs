//! The manuals of the subcommands of `aquifer region`.

use crate::manual::Manual;

/// One manual for each subcommand, by its name.
pub(in crate::commands) const MANUALS: &[(&str, &Manual)] = &[
    ("create", &CREATE),
    ("list", &LIST),
    ("show", &SHOW),
    ("resize-cache", &RESIZE_CACHE),
    ("limit", &LIMIT),
    ("persist", &PERSIST),
    ("drop", &DROP),
    ("pages", &PAGES),
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

const RESIZE_CACHE: Manual = Manual {
    examples: &[(
        "aquifer region resize-cache items --cache 512M",
        "Keep at most 512 MiB of it in local RAM",
    )],
    ..PART
};

const LIMIT: Manual = Manual {
    examples: &[
        ("aquifer region limit --cache 8G", "Limit all caches of this host together to 8 GiB"),
        ("aquifer region limit --cache none", "Remove the common limit"),
        ("aquifer region limit", "Show the limits"),
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

const PAGES: Manual = Manual {
    examples: &[
        ("aquifer region pages items", "Show where every page is"),
        (
            "aquifer region pages items --first 0 --count 256 --json",
            "Print where its first MiB is, as JSON",
        ),
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
