//! The terms of a group's agreement, as command-line arguments.

use std::path::PathBuf;

use aquifer_control::group::reprovision::Policy;
use aquifer_control::group::scan_rate::{Rate, Variant};
use aquifer_group::{Agreement, GroupEncryption};
use aquifer_page::Bytes;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};

use crate::commands::or_none::OrNone;

/// The terms of an agreement to change.
#[derive(Debug, Args)]
pub(super) struct Terms {
    /// Encryption of pages that leave a host
    ///
    /// A new group has 'deterministic'. 'group set' only strengthens it: from 'off' to
    /// 'deterministic' to 'random'.
    #[arg(long, value_name = "WAY")]
    encryption: Option<EncryptionName>,
    /// Scan rate: csd, cs, c, or a number of pages per millisecond
    ///
    /// 'csd' adapts to free CPU, swapping and the savings found, 'cs' to the first two, and 'c' to
    /// free CPU only. A new group has 'csd'.
    #[arg(long, value_name = "RATE", value_parser = rate)]
    scan: Option<Variant>,
    /// Which VMs get the memory that sharing saves
    ///
    /// A new group has 'demand'.
    #[arg(long, value_name = "POLICY")]
    policy: Option<PolicyName>,
    /// Maximum saved memory that a VM gets in a period
    ///
    /// A period is 1 s by default ('aquifer serve reprovision --period'). A new group has 10 MiB.
    #[arg(long, value_name = "SIZE")]
    step: Option<Bytes>,
    /// Saved memory that the disk cache keeps before VMs get any
    ///
    /// A new group has 10 MiB.
    #[arg(long, value_name = "SIZE")]
    cache_reserve: Option<Bytes>,
    /// Allow lending saved memory to other groups: yes or no
    ///
    /// With 'yes' the group may also borrow from other groups of the host that allow it, and then
    /// pays for their scanners. A new group has 'no'.
    #[arg(long, value_name = "YES|NO", value_parser = yes_or_no())]
    allow_lending: Option<bool>,
    /// Cgroup on each host, charged for the group's CPU, or 'none'
    ///
    /// A new group has none.
    #[arg(long, value_name = "DIR|none")]
    cgroup: Option<OrNone<PathBuf>>,
    /// Region or VM that may join, or 'any'; repeat for more
    ///
    /// A '*' at the end matches any text. A new group admits any. 'group set' replaces the list:
    /// name all members.
    #[arg(long = "member", value_name = "NAME")]
    members: Vec<String>,
    /// Host that may have the group's key, or 'any'; repeat for more
    ///
    /// A '*' at the end matches any text. A new group is for all hosts of the cluster. 'group set'
    /// replaces the list. A host that has the key keeps it.
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
    /// Maximum number of members on a host, or 'none'
    ///
    /// A new group has no limit.
    #[arg(long, value_name = "N|none")]
    max_members: Option<OrNone<usize>>,
    /// Maximum memory of all members on a host, or 'none'
    ///
    /// Counts memory in the pool too. A new group has no limit.
    #[arg(long, value_name = "SIZE|none")]
    max_memory: Option<OrNone<Bytes>>,
    /// Maximum RAM of a host for the members' caches, or 'none'
    ///
    /// A new group has no limit.
    #[arg(long, value_name = "SIZE|none")]
    max_cache: Option<OrNone<Bytes>>,
}

/// Parses the scan rate.
pub(in crate::commands) fn rate(text: &str) -> Result<Variant, String> {
    match text {
        "c" => Ok(Variant::C),
        "cs" => Ok(Variant::Cs),
        "csd" => Ok(Variant::Csd),
        number => match number.parse() {
            Ok(pages) => Ok(Variant::Static(Rate(pages))),
            Err(_) => Err("write csd, cs, c, or a number of pages per millisecond".to_owned()),
        },
    }
}

/// Parses 'yes' or 'no'.
fn yes_or_no() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["yes", "no"]).map(|word| word == "yes")
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EncryptionName {
    /// Under the group's key: lenders can compare and share pages
    Deterministic,
    /// Under a key for each lease: lenders cannot compare pages
    Random,
    /// None: lenders can read pages
    Off,
}

impl From<EncryptionName> for GroupEncryption {
    fn from(name: EncryptionName) -> Self {
        match name {
            EncryptionName::Deterministic => Self::Deterministic,
            EncryptionName::Random => Self::Random,
            EncryptionName::Off => Self::Off,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PolicyName {
    /// VMs that swap
    Demand,
    /// All VMs alike
    Fair,
    /// Each VM in proportion to its contribution
    Entitlement,
}

impl From<PolicyName> for Policy {
    fn from(name: PolicyName) -> Self {
        match name {
            PolicyName::Demand => Self::Demand,
            PolicyName::Fair => Self::Fair,
            PolicyName::Entitlement => Self::Entitlement,
        }
    }
}

impl Terms {
    /// Returns whether no term is given.
    pub(super) fn is_empty(&self) -> bool {
        let limits =
            self.max_members.is_some() || self.max_memory.is_some() || self.max_cache.is_some();
        let own = self.encryption.is_some()
            || self.scan.is_some()
            || self.policy.is_some()
            || self.step.is_some()
            || self.cache_reserve.is_some()
            || self.allow_lending.is_some();
        !(own || limits || self.cgroup.is_some() || self.has_names())
    }

    fn has_names(&self) -> bool {
        !(self.members.is_empty() && self.hosts.is_empty())
    }

    /// Applies the given terms to an agreement.
    ///
    /// # Errors
    /// If the resulting scan or reprovisioning terms are invalid.
    pub(super) fn apply(
        self,
        agreement: &mut Agreement,
    ) -> Result<(), aquifer_control::group::ConfigError> {
        let Agreement { encryption, lends, cgroup, limits, scan, reprovision, .. } = agreement;
        let set = |to: &mut Option<Bytes>, said: Option<OrNone<Bytes>>| {
            if let Some(OrNone(said)) = said {
                *to = said;
            }
        };
        *encryption = self.encryption.map_or(*encryption, GroupEncryption::from);
        scan.variant = self.scan.unwrap_or(scan.variant);
        reprovision.policy = self.policy.map_or(reprovision.policy, Policy::from);
        reprovision.step = self.step.unwrap_or(reprovision.step);
        reprovision.keep = self.cache_reserve.unwrap_or(reprovision.keep);
        *lends = self.allow_lending.unwrap_or(*lends);
        if let Some(OrNone(said)) = self.cgroup {
            *cgroup = said;
        }
        for (names, given) in
            [(&mut agreement.members, self.members), (&mut agreement.hosts, self.hosts)]
        {
            if !given.is_empty() {
                *names = given.into_iter().filter(|name| name != "any").collect();
            }
        }
        if let Some(OrNone(said)) = self.max_members {
            limits.members = said;
        }
        set(&mut limits.memory, self.max_memory);
        set(&mut limits.cache, self.max_cache);
        scan.validate()?;
        reprovision.validate()
    }
}
