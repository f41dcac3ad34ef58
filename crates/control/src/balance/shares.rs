//! The arithmetic of fair shares: weighted max-min fairness, in bytes and in whole sections.

use aquifer_page::Bytes;

use super::section::Section;

/// One VM's bounds in a division of memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    /// The VM gets this in any case.
    pub(super) least: Bytes,
    /// The VM wants no more.
    pub(super) most: Bytes,
    pub(super) weight: u32,
}

/// Fractional bits of a level, so that large weights do not make shares coarse.
const FRACTION: u32 = 20;

impl Claim {
    /// Returns the VM's share when each unit of weight gets `level`.
    fn at(&self, level: u128) -> u64 {
        let share =
            u64::try_from((level * u128::from(self.weight)) >> FRACTION).unwrap_or(u64::MAX);
        share.min(self.most.0).max(self.least.0)
    }
}

/// Divides `pool` bytes by weighted max-min fairness: it raises all claims to one level, by weight,
/// each within its least and its most. If the sum of the leasts exceeds the pool, each claim still
/// gets its least.
pub(super) fn fair(pool: u128, claims: &[Claim]) -> Vec<Bytes> {
    let all = |level: u128| claims.iter().map(|claim| u128::from(claim.at(level))).sum::<u128>();
    // At the upper end, a weight of one gets the largest `u64`.
    let (mut fits, mut end) = (0, 1u128 << (u64::BITS + FRACTION));
    while end - fits > 1 {
        let middle = fits + (end - fits) / 2;
        if all(middle) <= pool { fits = middle } else { end = middle }
    }
    claims.iter().map(|claim| Bytes(claim.at(fits))).collect()
}

/// A VM that is to grow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grower {
    pub(super) size: Bytes,
    /// In sections.
    pub(super) wants: u64,
    pub(super) weight: u32,
}

/// Divides `sections` among the growers, so that their sizes become as fair as whole sections
/// allow. No section is left while a grower wants one. VMs of weight 0 get only sections that the
/// others leave.
pub(super) fn divide(mut sections: u64, growers: &[Grower], section: Section) -> Vec<u64> {
    let mut gets = vec![0; growers.len()];
    for weightless in [false, true] {
        let of: Vec<usize> =
            (0..growers.len()).filter(|&i| (growers[i].weight == 0) == weightless).collect();
        let claims: Vec<Claim> = of.iter().map(|&i| claim(&growers[i], section)).collect();
        let have: u128 = claims.iter().map(|claim| u128::from(claim.least.0)).sum();
        let pool = have + u128::from(section.bytes(sections).0);
        for (&i, share) in of.iter().zip(fair(pool, &claims)) {
            gets[i] = section
                .down(share.saturating_sub(growers[i].size))
                .min(growers[i].wants)
                .min(sections);
            sections -= gets[i];
        }
        // Rounding leaves less than one section for each grower, which goes to the smallest by
        // weight.
        let mut missing: Vec<usize> =
            of.into_iter().filter(|&i| gets[i] < growers[i].wants).collect();
        missing.sort_by_key(|&i| {
            let has = growers[i].size.saturating_add(section.bytes(gets[i]));
            u128::from(has.0) * SCALE / u128::from(growers[i].weight.max(1))
        });
        while sections > 0 && !missing.is_empty() {
            for &i in &missing {
                let one = sections.min(1);
                gets[i] += one;
                sections -= one;
            }
            missing.retain(|&i| gets[i] < growers[i].wants);
        }
    }
    gets
}

/// The scale that keeps sizes distinct after the division by weight.
const SCALE: u128 = 1 << 32;

fn claim(grower: &Grower, section: Section) -> Claim {
    let most = grower.size.saturating_add(section.bytes(grower.wants));
    Claim { least: grower.size, most, weight: grower.weight.max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECTION: Bytes = Bytes::mib(128);

    fn claims(given: &[(u64, u64, u32)]) -> Vec<Claim> {
        let claim =
            |&(least, most, weight)| Claim { least: Bytes(least), most: Bytes(most), weight };
        given.iter().map(claim).collect()
    }

    fn shares(pool: u128, given: &[(u64, u64, u32)]) -> Vec<u64> {
        fair(pool, &claims(given)).into_iter().map(|share| share.0).collect()
    }

    fn grown(sections: u64, growers: &[(u64, u64, u32)]) -> Vec<u64> {
        let grower =
            |&(size, wants, weight)| Grower { size: Bytes::mib(128 * size), wants, weight };
        let growers: Vec<_> = growers.iter().map(grower).collect();
        divide(sections, &growers, Section::new(SECTION).unwrap())
    }

    #[test]
    fn small_claims_are_met_and_weights_divide_the_rest() {
        assert_eq!(shares(100, &[(0, 10, 1), (0, 100, 1), (0, 100, 2)]), [10, 30, 60]);
        assert_eq!(shares(1000, &[(0, 10, 1), (0, 100, 1), (0, 100, 2)]), [10, 100, 100]);
    }

    #[test]
    fn nobody_gets_less_than_its_least_and_weight_zero_gets_no_more() {
        assert_eq!(shares(100, &[(70, 90, 1), (0, 90, 1), (5, 90, 0)]), [70, 25, 5]);
        assert_eq!(shares(10, &[(70, 90, 1), (20, 90, 1)]), [70, 20]);
    }

    #[test]
    fn extreme_weights_and_sizes_are_divided_too() {
        let most = u64::MAX;
        assert_eq!(
            shares(u128::from(most) * 2, &[(0, most, 1), (0, most, u32::MAX)]),
            [most, most]
        );
        let shares = shares(1 << 40, &[(0, most, u32::MAX), (0, most, u32::MAX)]);
        assert!(shares.iter().all(|&share| share.abs_diff(1 << 39) <= 4096), "{shares:?}");
    }

    #[test]
    fn sections_make_sizes_equal_not_growth() {
        assert_eq!(grown(6, &[(8, 10, 1), (4, 10, 1)]), [1, 5]);
        assert_eq!(grown(6, &[(8, 10, 2), (4, 10, 1)]), [4, 2]);
    }

    #[test]
    fn no_section_is_left_while_somebody_wants_one() {
        assert_eq!(grown(1, &[(8, 3, 1), (8, 3, 1)]), [1, 0]);
        assert_eq!(grown(100, &[(8, 3, 1), (4, 5, 0), (4, 1, 7)]), [3, 5, 1]);
        assert_eq!(grown(4, &[(8, 3, 1), (0, 5, 0)]), [3, 1]);
        assert_eq!(grown(4, &[]), [0; 0]);
    }
}
