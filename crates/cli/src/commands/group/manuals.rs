//! The manuals of the subcommands of `aquifer group`.

use crate::manual::Manual;

/// One manual for each subcommand, by its name.
pub(in crate::commands) const MANUALS: &[(&str, &Manual)] =
    &[("create", &CREATE), ("list", &LIST), ("show", &SHOW), ("set", &SET), ("rm", &RM)];

/// The part that all of them have in common.
const PART: Manual = Manual { see_also: &["aquifer-group(1)"], ..Manual::NONE };

const CREATE: Manual = Manual {
    examples: &[
        (
            "aquifer group create blue",
            "Create a group; the cluster's other hosts get its agreement from this one",
        ),
        (
            "aquifer group create blue --max-memory 64G --member 'web-*'",
            "Create a group with limits",
        ),
        (
            "aquifer group create blue --host a --host 'vmhost-*'",
            "Create a group whose key only these hosts get",
        ),
    ],
    ..PART
};

const LIST: Manual = Manual {
    examples: &[
        ("aquifer group list", "List all groups that this host knows"),
        ("aquifer group list --json | jq -r '.[].name'", "Print only their names"),
    ],
    ..PART
};

const SHOW: Manual = Manual {
    examples: &[
        ("aquifer group show blue", "Show its terms, its regions here and their savings"),
        ("aquifer group show blue --json | jq -r .key_id", "Print the fingerprint of its key"),
    ],
    ..PART
};

const SET: Manual = Manual {
    examples: &[
        (
            "aquifer group set blue --policy fair --allow-lending yes --max-memory 64G",
            "Change three terms; the others stay",
        ),
        ("aquifer group set blue --encryption random", "Hide from lenders which pages are equal"),
    ],
    ..PART
};

const RM: Manual = Manual {
    examples: &[("aquifer group rm blue", "Remove a group that has no region here")],
    ..PART
};
