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
    ("start", &START),
    ("rm", &RM),
    ("exec", &EXEC),
];

/// The part that all of them have in common.
const PART: Manual = Manual { see_also: &["aquifer-region(1)"], ..Manual::NONE };

const CREATE: Manual = Manual {
    examples: &[(
        "aquifer region create items --size 4G --cache 1G --lender nbds://b.example.org/ --tls /etc/aquifer/tls",
        "4 GiB, of which at most 1 GiB is local RAM",
    )],
    ..PART
};

const LIST: Manual = Manual {
    examples: &[
        ("aquifer region list", "All regions of this host"),
        ("aquifer region list --json | jq -r '.[].name'", "Only their names"),
    ],
    ..PART
};

const SHOW: Manual = Manual {
    examples: &[
        ("aquifer region show items", "Where its pages are, and how long faults take"),
        ("aquifer region show items --json | jq .waiting", "How many faults wait for a lender"),
    ],
    ..PART
};

const RESIZE_CACHE: Manual = Manual {
    examples: &[(
        "aquifer region resize-cache items 512M",
        "Keep at most 512 MiB of it in local RAM",
    )],
    ..PART
};

const LIMIT: Manual = Manual {
    examples: &[
        ("aquifer region limit 8G", "All caches of this host together take at most 8 GiB"),
        ("aquifer region limit none", "No common limit"),
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
        ("aquifer region drop items", "Make all of it zeroes"),
        ("aquifer region drop items --first 0 --count 256", "Make its first MiB zeroes"),
    ],
    ..PART
};

const PAGES: Manual = Manual {
    examples: &[
        ("aquifer region pages items", "Where every page is"),
        (
            "aquifer region pages items --first 0 --count 256 --json",
            "Where its first MiB is, for a program",
        ),
    ],
    ..PART
};

const START: Manual = Manual {
    examples: &[("aquifer region start items", "Serve a region whose processes were killed")],
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
            "A program that maps a file",
        ),
        (
            "aquifer region exec --heap items -- redis-server --save ''",
            "An unmodified program, whose heap is the region",
        ),
    ],
    exit: &[("any other", "the program's own: it takes the place of this command")],
    ..PART
};
