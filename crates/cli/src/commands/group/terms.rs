//! The terms of a group's agreement, as command-line arguments.

use std::path::PathBuf;

use aquifer_control::group::reprovision::Policy;
use aquifer_control::group::scan_rate::{Rate, Variant};
use aquifer_group::{Agreement, Sealed};
use aquifer_page::Bytes;
use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};

use crate::commands::or_none::OrNone;

/// What of an agreement is to be so, and not as it is.
#[derive(Debug, Args)]
pub(super) struct Terms {
    /// How its pages leave a host: deterministic where nothing was ever said
    #[arg(long, value_name = "WAY")]
    sealed: Option<SealedName>,
    /// How fast equal pages are looked for: csd, cs, c, or so many pages per millisecond
    #[arg(long, value_name = "RATE", value_parser = rate)]
    scan: Option<Variant>,
    /// Who gets what sharing saves: demand where nothing was ever said
    #[arg(long, value_name = "POLICY")]
    policy: Option<PolicyName>,
    /// How much a VM gets of it in a period
    #[arg(long, value_name = "SIZE")]
    step: Option<Bytes>,
    /// How much of it is left to the group's cache before a VM gets any
    #[arg(long, value_name = "SIZE")]
    keep: Option<Bytes>,
    /// Whether what the group saves and does not need may be lent to other groups of a host, and it may borrow from those and pay for their scanners
    #[arg(long, value_name = "YES|NO", value_parser = BoolishValueParser::new())]
    lends: Option<bool>,
    /// The cgroup of each host in which the group pays for CPU, or 'none'
    #[arg(long, value_name = "DIR|none")]
    cgroup: Option<OrNone<PathBuf>>,
    /// A region or VM that may join, where '*' at the end stands for any text; can be given several times. 'any': all may
    #[arg(long = "member", value_name = "NAME")]
    members: Vec<String>,
    /// How many members there may be on a host, or 'none'
    #[arg(long, value_name = "N|none")]
    max_members: Option<OrNone<usize>>,
    /// What memory they may have together on a host, wherever it is, or 'none'
    #[arg(long, value_name = "SIZE|none")]
    max_memory: Option<OrNone<Bytes>>,
    /// What RAM of a host their caches may take together, or 'none'
    #[arg(long, value_name = "SIZE|none")]
    max_cache: Option<OrNone<Bytes>>,
}

/// Parses the scan rate.
pub(super) fn rate(text: &str) -> Result<Variant, String> {
    match text {
        "c" => Ok(Variant::C),
        "cs" => Ok(Variant::Cs),
        "csd" => Ok(Variant::Csd),
        number => match number.parse() {
            Ok(pages) => Ok(Variant::Static(Rate(pages))),
            Err(_) => Err("'csd', 'cs', 'c', or a number of pages per millisecond".to_owned()),
        },
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SealedName {
    /// Under the group's key, so that a lender can keep equal pages once; it can tell which are equal
    Deterministic,
    /// Each lease under a key of its own: a lender can tell nothing of two pages, and share none
    Random,
    /// As they are, for the lender to read
    Off,
}

impl From<SealedName> for Sealed {
    fn from(name: SealedName) -> Self {
        match name {
            SealedName::Deterministic => Self::Deterministic,
            SealedName::Random => Self::Random,
            SealedName::Off => Self::Off,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PolicyName {
    /// VMs that swap
    Demand,
    /// All VMs the same
    Fair,
    /// Each VM in proportion to what it contributes
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
        let Self { sealed, scan, policy, step, keep, lends, cgroup, members, .. } = self;
        let limits =
            self.max_members.is_some() || self.max_memory.is_some() || self.max_cache.is_some();
        let own = sealed.is_some()
            || scan.is_some()
            || policy.is_some()
            || step.is_some()
            || keep.is_some();
        !(own || limits || lends.is_some() || cgroup.is_some() || !members.is_empty())
    }

    /// Applies the given terms to an agreement.
    ///
    /// # Errors
    /// If the resulting scan or reprovisioning terms are invalid.
    pub(super) fn apply(
        self,
        agreement: &mut Agreement,
    ) -> Result<(), aquifer_control::group::ConfigError> {
        let Agreement { sealed, lends, cgroup, members, limits, scan, reprovision, .. } = agreement;
        let set = |to: &mut Option<Bytes>, said: Option<OrNone<Bytes>>| {
            if let Some(OrNone(said)) = said {
                *to = said;
            }
        };
        *sealed = self.sealed.map_or(*sealed, Sealed::from);
        scan.variant = self.scan.unwrap_or(scan.variant);
        reprovision.policy = self.policy.map_or(reprovision.policy, Policy::from);
        reprovision.step = self.step.unwrap_or(reprovision.step);
        reprovision.keep = self.keep.unwrap_or(reprovision.keep);
        *lends = self.lends.unwrap_or(*lends);
        if let Some(OrNone(said)) = self.cgroup {
            *cgroup = said;
        }
        if !self.members.is_empty() {
            *members = self.members.into_iter().filter(|name| name != "any").collect();
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
