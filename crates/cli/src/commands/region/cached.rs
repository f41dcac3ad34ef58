//! The arguments of memory in the pool, for every command that makes some.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use aquifer_api::order::{Claim, ClaimPurpose};
use aquifer_page::{Bytes, EXTENT_SIZE, Group, RegionName};
use aquifer_region::process::{Files, RegionSpec, disk_copies_in};
use aquifer_region::{LinkSpec, Paging, PolicyKind, PrefetchKind, RegionError, Scheme};
use aquifer_volume::{DiskCopies, LeaseTarget, VolumeConfig};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, ValueEnum};

use super::plan::Plan;
use crate::agent_call::Socket;
use crate::commands::Common;
use crate::commands::group::Groups;
use crate::commands::region::directory;
use crate::failure::{Failure, OrFail as _, Result};
use crate::lender::{ClaimedLender, PastOwner, Purpose, Trust};
use crate::lender_uri::LenderUri;
use crate::lenders::Lenders;

/// Memory that is in the pool, with local RAM as its cache.
#[derive(Debug, Args)]
pub(crate) struct Cached {
    /// Maximum local RAM that caches its pages, or 'auto'
    ///
    /// With 'auto' all pages begin in local RAM. While this host is short of memory, its agent
    /// borrows from other hosts, and moves cold pages there.
    #[arg(long, value_name = "SIZE")]
    cache: CacheSize,
    /// Group that it joins; see 'aquifer group'
    #[arg(long, value_name = "GROUP", default_value_t = Group::default())]
    group: Group,
    /// Lender of its pages, as in 'aquifer volume attach'; repeat for more
    ///
    /// Without it, this host's agent borrows from other hosts: at once with a size of --cache, and
    /// with 'auto' while this host is short of memory.
    #[arg(long = "lender", value_name = "URI")]
    lenders: Vec<LenderUri>,
    /// Copies of each page besides that at its lender
    ///
    /// With 'mirror', name lenders in pairs on different hosts: the second of each pair has a copy
    /// of what the first has. Each write goes to both. If one lender dies, programs go on with the
    /// other. 'opportunistic' is the same, but a write ends when the first lender has the page: the
    /// second gets it a moment later, from at most 64 MiB of locked memory. With 'disk', this
    /// host's disk has a copy, in files in --copy-dir. It lags behind by what fits into 64 MiB of
    /// locked memory, and is read only if a lender fails. For what this host's agent borrows,
    /// 'borrow.protection' of its configuration holds, too.
    #[arg(
        long,
        value_name = "KIND",
        default_value = "none",
        requires_ifs([("mirror", "lenders"), ("opportunistic", "lenders")]),
    )]
    protection: Protection,
    /// Directory on a disk for the copies of '--protection disk'
    #[arg(long, value_name = "DIR", default_value = "/var/lib/aquifer/spill")]
    copy_dir: PathBuf,
    #[command(flatten)]
    paging: PagingOptions,
    #[command(flatten)]
    groups: Groups,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    socket: Socket,
}

/// How pages come into the cache and leave it.
#[derive(Debug, Args)]
struct PagingOptions {
    /// Eviction policy: round-robin, clock, fifo, random or sieve
    #[arg(long, value_name = "POLICY", default_value_t = PolicyKind::default())]
    policy: PolicyKind,
    /// When to evict pages
    #[arg(long, value_name = "SCHEME", default_value = "pre-evict")]
    scheme: SchemeName,
    /// Prefetch policy: off, sequential, trend or auto
    ///
    /// A prefetched page that no program touches costs a fetch and a frame of the cache.
    #[arg(long, value_name = "WAY", default_value_t = PrefetchKind::default())]
    prefetch: PrefetchKind,
    /// How long a fault waits for an unreachable lender
    ///
    /// After that, the program gets SIGBUS. By default it waits indefinitely.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    fault_timeout: Option<Duration>,
    /// Emulate a link that delays each page by TIME
    ///
    /// The delay applies in both directions. Without --lender pages stay in this host's RAM until
    /// the engine ends, and --cache must be a size. Default: no emulation.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    emulate_link: Option<Duration>,
    /// Let the emulated link carry one page at a time
    #[arg(long, requires = "emulate_link")]
    one_at_a_time: bool,
    /// Number of faults to serve at a time; each costs a thread
    #[arg(long, value_name = "N", default_value_t = Paging::DEFAULT_WORKERS)]
    workers: usize,
}

impl PagingOptions {
    /// Returns these options as an engine takes them.
    fn paging(&self) -> Paging {
        let link = |latency| LinkSpec { latency, one_at_a_time: self.one_at_a_time };
        Paging {
            policy: self.policy,
            scheme: match self.scheme {
                SchemeName::OnDemand => Scheme::OnDemand,
                SchemeName::PreEvict => Scheme::PreEvict,
            },
            prefetch: self.prefetch,
            link: self.emulate_link.map(link),
            fault_timeout: self.fault_timeout,
            workers: self.workers.max(1),
        }
    }
}

/// The limit of a local cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheSize {
    /// The host's agent chooses it.
    Auto,
    /// The operator chose it.
    Bytes(Bytes),
}

impl FromStr for CacheSize {
    type Err = <Bytes as FromStr>::Err;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        if text == "auto" { Ok(Self::Auto) } else { text.parse().map(Self::Bytes) }
    }
}

impl CacheSize {
    /// Returns the limit at the start of a region of this size.
    fn at_start(self, size: Bytes) -> Bytes {
        match self {
            Self::Auto => size,
            Self::Bytes(bytes) => bytes,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Protection {
    /// One copy: a page is lost with its lender
    None,
    /// Two copies, at two lenders
    Mirror,
    /// Two copies, at two lenders: the second lags a moment behind
    Opportunistic,
    /// Two copies, at a lender and on this host's disk
    Disk,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SchemeName {
    /// Evict a page when another one needs its frame
    OnDemand,
    /// Keep a few frames free, so that no fetch waits for an eviction
    PreEvict,
}

/// The memory of a VM: a region, by default with a cache that the agent sizes. With '--cache none'
/// or huge pages it is QEMU's own, and the other options of [`Cached`] are refused.
#[derive(Debug)]
pub(crate) struct MaybeCached(pub(crate) Option<Cached>);

/// The value of --cache for memory that is QEMU's own.
const NONE: &str = "none";

/// The option for memory that is QEMU's own, in huge pages.
const HUGE_PAGES: &str = "huge_pages";

impl Args for MaybeCached {
    fn augment_args(command: Command) -> Command {
        let parse = |text: &str| match text {
            NONE => Ok(CacheSize::Auto),
            size => size.parse(),
        };
        Cached::augment_args(command).mut_arg("cache", |cache| {
            cache
                .required(false)
                .value_parser(parse)
                .default_value("auto")
                .hide_default_value(true)
                .help("Maximum local RAM that caches its pages, 'auto' or 'none'; default auto")
                .long_help(
                    "Maximum local RAM that caches its pages, 'auto' or 'none'; default auto\n\n\
                     With 'auto' all pages begin in local RAM. While this host is short of \
                     memory, its agent borrows from other hosts, and moves cold pages there. With \
                     'none' the memory is QEMU's own: no page leaves this host, and the VM \
                     cannot migrate, nor join a group. So it is with --huge-pages.",
                )
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for MaybeCached {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
        if matches.try_contains_id(HUGE_PAGES).unwrap_or_default()
            && matches.value_source("cache").is_some_and(|by| by != ValueSource::DefaultValue)
            && !is_none(matches)
        {
            let why = "memory in --huge-pages has no cache: omit --cache\n";
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, why));
        }
        if has_cache(matches) {
            return Cached::from_arg_matches(matches).map(Some).map(Self);
        }
        match needless(matches) {
            None => Ok(Self(None)),
            Some(option) => {
                let why =
                    format!("--{option} needs a cache: omit --huge-pages and '--cache none'\n");
                Err(clap::Error::raw(ErrorKind::MissingRequiredArgument, why))
            }
        }
    }

    fn update_from_arg_matches(
        &mut self,
        matches: &ArgMatches,
    ) -> std::result::Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Returns whether these options of a VM give it a cache.
pub(crate) fn has_cache(matches: &ArgMatches) -> bool {
    !is_none(matches) && !matches.try_contains_id(HUGE_PAGES).unwrap_or_default()
}

fn is_none(matches: &ArgMatches) -> bool {
    matches.get_raw("cache").is_some_and(|mut raw| raw.next() == Some(NONE.as_ref()))
}

/// Returns an option of [`Cached`] that the command line gives, if there is one.
fn needless(matches: &ArgMatches) -> Option<String> {
    let all = Cached::augment_args(Command::new(""));
    let is_given = |option: &&Arg| {
        matches.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine)
    };
    let others = all.get_arguments().filter(|option| option.get_id() != "cache");
    others.into_iter().find(is_given)?.get_long().map(str::to_owned)
}

impl Cached {
    /// Returns the claim for the cache of this region, which the command is about to make.
    ///
    /// With `in_use`, the region's programs use at most that much of it at first.
    pub(crate) fn claim(&self, name: &RegionName, size: Bytes, in_use: Bytes) -> Claim {
        let most = match self.cache {
            CacheSize::Auto => in_use,
            CacheSize::Bytes(cache) => cache,
        };
        let (group, pid) = (self.group.clone(), Some(std::process::id()));
        Claim { group, pid, ..Claim::new(name.clone(), ClaimPurpose::Cache, most.min(size)) }
    }

    /// Refuses a group that this host does not know: a VM in it would share with no other.
    ///
    /// # Errors
    /// If the group is unknown; the error lists the known ones. If the agreements cannot be read.
    pub(crate) fn require_group(&self, common: &Common) -> Result<()> {
        let groups = self.groups.all();
        let what = || format!("joining group '{}'", self.group);
        if self.group == Group::default()
            || self.groups.to_join(common, &self.socket, &self.group)?.is_some()
        {
            return Ok(());
        }
        let known = groups.all().or_fail(what)?;
        let known: Vec<_> = known.iter().map(|agreement| agreement.name.to_string()).collect();
        let why = match known.is_empty() {
            true => "this host has no group".to_owned(),
            false => format!("this host has only {}", known.join(", ")),
        };
        Err(Failure::new(what(), why).help(format!(
            "create it with 'aquifer group create {}' on one host of the cluster; without \
             an agent, copy {} from there",
            self.group,
            groups.file(&self.group).display()
        )))
    }

    /// Names the files for the copies of the region's pages.
    fn disk_copies(&self, spec: &RegionSpec) -> Result<DiskCopies> {
        let what = || format!("creating region '{}'", spec.name);
        // The engine has another working directory.
        let directory = std::path::absolute(&self.copy_dir).or_fail(what)?;
        disk_copies_in(&directory, spec.volume).or_fail(what)
    }

    /// Returns the socket of this host's agent.
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Returns the size of the cache.
    pub(crate) fn cache(&self) -> CacheSize {
        self.cache
    }

    /// Asks all lenders for their capacity, or this host's agent for memory, and returns the region
    /// to make. With `owner`, lenders take it for the region that had their memory before, for
    /// example before a reboot.
    ///
    /// # Errors
    /// If the group refuses the region, if the region exists, if a lender or the agent cannot be
    /// reached, or if there is too little memory.
    pub(crate) fn plan(
        self,
        common: &Common,
        (name, owner): (RegionName, Option<PastOwner>),
        size: Bytes,
    ) -> Result<Plan> {
        let agreement = self.groups.to_join(common, &self.socket, &self.group)?;
        let paging = self.paging.paging();
        let is_remote = !self.lenders.is_empty() || paging.link.is_none();
        if agreement.is_none() && self.group != Group::default() && is_remote {
            let why = format!(
                "{} is missing: the region's pages get their own keys, and are never shared",
                self.groups.all().file(&self.group).display()
            );
            Failure::new(format!("joining group '{}'", self.group), why)
                .help("run 'aquifer group create' on one host of the cluster")
                .warn(common.json);
        }
        if let Some(agreement) = &agreement {
            let what = || format!("joining group '{}'", agreement.name);
            agreement.join(&directory(common)?, &name, size).or_fail(what)?;
        }
        // Checked before the lenders: those of an existing region would refuse with another error.
        if Files::new(&directory(common)?, &name).region().exists() {
            let what = format!("creating region '{name}'");
            return Err(Failure::new(what, RegionError::Exists(name)));
        }
        let encrypt = |lease: &mut LeaseTarget| match &agreement {
            _ if self.trust.unencrypted => lease.encryption = None,
            // For a local lender, too: its other borrowers of the group encrypt in the same way.
            Some(agreement) => lease.encryption = agreement.lease_encryption(),
            None => {}
        };
        let find = |uri: &LenderUri| {
            let purpose = Purpose::Region(&name, owner);
            let mut lender = ClaimedLender::find(uri, &self.trust, None, purpose)?;
            encrypt(&mut lender.lease);
            Ok(lender)
        };
        let what = format!("finding room for '{name}'");
        let is_lagging = self.protection == Protection::Opportunistic;
        let mirror = is_lagging || self.protection == Protection::Mirror;
        let mut lenders = Lenders::find(&what, &self.lenders, mirror, find)?;
        lenders.copies.iter_mut().for_each(|copy| copy.lags = is_lagging);
        let missing = size.0.next_multiple_of(EXTENT_SIZE).saturating_sub(lenders.capacity().0);
        if missing > 0 && !self.lenders.is_empty() {
            let why = format!("its lenders have {} less than its size needs", Bytes(missing));
            return Err(
                Failure::new(what, why).help("add another --lender, or choose a smaller size")
            );
        }
        let auto = self.cache == CacheSize::Auto;
        if auto && self.lenders.is_empty() && paging.link.is_some() {
            let why = "no page leaves a cache of size 'auto' for an emulated link";
            return Err(Failure::new(format!("creating region '{name}'"), why)
                .help("give --cache a size, or name a --lender"));
        }
        let spec = RegionSpec::new(name, size, self.cache.at_start(size));
        let disk = match self.protection {
            Protection::Disk => Some(self.disk_copies(&spec)?),
            Protection::None | Protection::Mirror | Protection::Opportunistic => None,
        };
        let needs_agent = self.lenders.is_empty() && paging.link.is_none() && !auto;
        let agent = needs_agent.then(|| self.socket.clone());
        let spec = RegionSpec {
            group: self.group,
            io_timeout: paging
                .fault_timeout
                .unwrap_or(VolumeConfig::DEFAULT_IO_TIMEOUT)
                .min(VolumeConfig::DEFAULT_IO_TIMEOUT),
            paging,
            identity: lenders.identity,
            leases: lenders.leases,
            copies: lenders.copies,
            disk,
            auto,
            began_local: auto,
            ..spec
        };
        match agent {
            None => Ok(Plan::new(spec)),
            Some(agent) => Plan::with_agent(common, agent, spec, encrypt),
        }
    }
}
