//! The manuals of the subcommands of `aquifer group`.

use crate::manual::Manual;

/// One manual for each subcommand, by its name.
pub(in crate::commands) const MANUALS: &[(&str, &Manual)] = &[
    ("create", &CREATE),
    ("list", &LIST),
    ("show", &SHOW),
    ("set", &SET),
    ("rm", &RM),
    ("scan", &SCAN),
    ("balance", &BALANCE),
    ("cache", &CACHE),
];

/// The part that all of them have in common.
const PART: Manual = Manual { see_also: &["aquifer-group(1)"], ..Manual::NONE };

const CREATE: Manual = Manual {
    examples: &[
        (
            "aquifer group create blue",
            "Then copy /etc/aquifer/groups/blue.toml to the group's other hosts",
        ),
        ("aquifer group create blue --max-memory 64G --member 'web-*'", "A group with limits"),
    ],
    ..PART
};

const LIST: Manual =
    Manual { examples: &[("aquifer group list", "All groups that this host knows")], ..PART };

const SHOW: Manual = Manual {
    examples: &[
        ("aquifer group show blue", "Its terms, its regions here, and what they share"),
        ("aquifer group show blue --json | jq -r .key_id", "Which key this host has"),
    ],
    ..PART
};

const SET: Manual = Manual {
    examples: &[
        (
            "aquifer group set blue --policy fair --lends yes --max-memory 64G",
            "Change three terms; the others stay",
        ),
        ("aquifer group set blue --sealed random", "Hide from lenders which pages are equal"),
    ],
    ..PART
};

const RM: Manual = Manual {
    examples: &[("aquifer group rm blue", "Forget a group that has no region here")],
    ..PART
};

const SCAN: Manual = Manual {
    examples: &[
        (
            "aquifer group scan blue --report 10s",
            "Share equal pages, and say every 10 s what that saves",
        ),
        ("aquifer group scan blue --undo", "Stop sharing pages"),
    ],
    ..PART
};

const BALANCE: Manual = Manual {
    examples: &[
        ("aquifer group balance", "Give what groups save to their VMs"),
        ("aquifer group balance --dry-run --periods 1", "Only say once what it would do"),
        ("aquifer group balance --undo", "Give every VM its own memory again"),
    ],
    ..PART
};

const CACHE: Manual = Manual {
    examples: &[
        ("aquifer group cache blue --size 2G", "Cache the group's disks in at most 2 GiB"),
        (
            "aquifer group cache blue --lender nbds://b.example.org:10811/ --tls /etc/aquifer/tls",
            "Send what leaves the cache to host b",
        ),
    ],
    ..PART
};
