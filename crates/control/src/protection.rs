//! How many copies pages have at lenders.

use std::collections::BTreeMap;

use aquifer_page::{Group, RegionName};

use crate::Owner;

/// How many copies the pages of a region, or of swap, have at lenders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protection {
    /// One: the pages are lost with their lender.
    #[default]
    None,
    /// Two, on different lenders.
    Mirror,
    /// Two, on different lenders, while a lender has memory that nobody else needs.
    Opportunistic,
}

/// The protection of each region, and of swap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Protections {
    /// That of the pages that this host swaps out.
    pub swap: Protection,
    /// That of regions that the other fields do not name.
    pub default: Protection,
    /// That of the regions of groups.
    pub groups: BTreeMap<Group, Protection>,
    /// That of regions, whatever their groups.
    pub regions: BTreeMap<RegionName, Protection>,
}

impl Protections {
    /// Returns the same protection for all regions, and none for swap.
    pub fn all(default: Protection) -> Self {
        Self { default, ..Self::default() }
    }

    /// Returns the protection of the pages of an owner.
    pub fn of(&self, owner: &Owner, group: &Group) -> Protection {
        match owner {
            Owner::Swap => self.swap,
            Owner::Region(region) => {
                let named = self.regions.get(region).or_else(|| self.groups.get(group));
                named.copied().unwrap_or(self.default)
            }
        }
    }

    /// Returns whether any pages may have second copies.
    pub fn has_copies(&self) -> bool {
        let named = self.groups.values().chain(self.regions.values());
        named.chain([&self.default, &self.swap]).any(|protection| *protection != Protection::None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_goes_before_its_group_and_that_before_the_default() {
        let group = |name: &str| Group::try_from(name.to_owned()).unwrap();
        let rules = Protections {
            default: Protection::Opportunistic,
            groups: BTreeMap::from([(group("bank"), Protection::Mirror)]),
            regions: BTreeMap::from([("scratch".parse().unwrap(), Protection::None)]),
            swap: Protection::Mirror,
        };
        let of =
            |region: &str, of: &str| rules.of(&Owner::Region(region.parse().unwrap()), &group(of));
        assert_eq!(of("web", "shop"), Protection::Opportunistic);
        assert_eq!(of("web", "bank"), Protection::Mirror);
        assert_eq!(of("scratch", "bank"), Protection::None);
        assert_eq!(rules.of(&Owner::Swap, &group("shop")), Protection::Mirror);
        assert!(rules.has_copies() && !Protections::default().has_copies());
        let all = Protections::all(Protection::Opportunistic);
        assert_eq!(all.of(&Owner::Swap, &group("bank")), Protection::None);
        assert!(Protections { swap: Protection::Mirror, ..Protections::default() }.has_copies());
    }
}
