//! How a volume can become a block device here.

use super::Check;

pub(super) fn checks() -> Vec<Check> {
    Vec::new()
}
