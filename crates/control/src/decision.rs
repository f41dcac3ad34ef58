//! The decisions of the controller, for the log and the status.

use std::fmt;
use std::time::Duration;

use aquifer_page::{Bytes, HostName, LeaseId, RegionName, VolumeId};
use serde::Serialize;

use crate::ledger::Ledger;
use crate::{Cause, Memory, Owner, Reason, Role};

/// One decision with its numbers. `Display` writes it as a sentence, with this host as the subject.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decision {
    /// The time of the decision, on the clock of the events.
    pub at: Duration,
    /// The last reading.
    pub memory: Memory,
    /// T_upper, a share of M_t.
    pub upper: f64,
    /// T_lower, a share of M_t.
    pub lower: f64,
    /// The decision.
    #[serde(flatten)]
    pub what: What,
}

/// The reason why a borrow by hand does not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// This host lends, and no host does both.
    Lending,
    /// A round is under way already.
    Asking,
    /// The operator asked for zero bytes.
    Nothing,
    /// The request would exceed `max_borrowed`.
    OverMax {
        /// The bytes borrowed already.
        borrowed: Bytes,
        /// The limit.
        max: Bytes,
    },
}

/// The reason why a lender recalls a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Because {
    /// The lender is overloaded, or borrows itself.
    Overload,
    /// The lender is draining.
    Drain,
    /// The borrower is no longer a peer of the lender.
    Parted,
    /// VMs of the lender need the memory.
    OwnVms,
    /// Others need the memory, and the lease holds second copies, which go first.
    GoesFirst,
}

/// A decision, or a fact that the host learned.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the fields are named as in the actions and messages they tell of")]
pub enum What {
    /// The role has changed (Fig. 3).
    RoleChanged { from: Role, to: Role },
    /// Sends `mem_bor_req`.
    Asks {
        lender: HostName,
        bytes: Bytes,
        cause: Option<Cause>,
        owner: Owner,
        copy_of: Option<LeaseId>,
        instead_of: Option<LeaseId>,
    },
    /// The lender did not answer in time.
    GivesUp { lender: HostName, bytes: Bytes, waited: Duration },
    /// The lender sent `mem_bor_rej`.
    Rejected { lender: HostName, bytes: Bytes, spare: Bytes, reason: Reason },
    /// The lender's agent refused to accept `mem_bor_req`.
    Refused { lender: HostName, bytes: Bytes, why: String },
    /// The lender sent `mem_bor_ack`.
    Got { lender: HostName, lease: LeaseId, bytes: Bytes, missing: Bytes },
    /// Makes a volume of the granted leases.
    Activates { volume: VolumeId, leases: usize, bytes: Bytes, wanted: Bytes, cause: Cause },
    /// The agent could not make the volume.
    ActivationFailed { volume: VolumeId, why: String },
    /// No lender grants a lease. `retry` is the time to wait if this host asked some, and `None` if
    /// no lender can spare an extent.
    NobodyLends { wanted: Bytes, cause: Cause, retry: Option<Duration> },
    /// This host no longer wants the round in progress.
    Abandons { wanted: Bytes, got: Bytes, cause: Option<Cause> },
    /// An ack came for a request that is no longer wanted, or a question about a lease that is not
    /// held.
    Unwanted { lender: HostName, lease: LeaseId },
    /// Does not start a round, although overload or the operator calls for one.
    BorrowRefused { bytes: Bytes, cause: Cause, refusal: Refusal },
    /// Hands granted leases to a region.
    Provides { region: RegionName, volume: VolumeId, leases: usize, bytes: Bytes },
    /// Lenders do not grant what a region needs, or this host does not ask for it.
    Lacks {
        region: RegionName,
        volume: VolumeId,
        wanted: Bytes,
        got: Bytes,
        refusal: Option<Refusal>,
    },
    /// The region did not use its new leases.
    Unclaimed { region: RegionName, volume: VolumeId, why: String },
    /// The region is gone.
    RegionGone { region: RegionName, volume: VolumeId, leases: usize },
    /// Gives a volume back.
    Deactivates { volume: VolumeId, bytes: Bytes, by_hand: bool },
    /// The agent could not give the volume back, and the volume stays in service.
    DeactivationFailed { volume: VolumeId, why: String },
    /// The volume is gone.
    Deactivated { volume: VolumeId, leases: usize },
    /// Sends `mem_bor_fin`.
    Finishes { lender: HostName, lease: LeaseId },
    /// The lender has not acknowledged `mem_bor_fin` for the whole grace, so it frees the lease on
    /// its own.
    FinDropped { lender: HostName, lease: LeaseId },
    /// The lender sent `mem_len_fin`.
    Recalled { lender: HostName, lease: LeaseId, bytes: Bytes },
    /// Moves the pages in a recalled lease.
    Evacuates { lease: LeaseId, lender: HostName, bytes: Bytes, onto: Bytes },
    /// The recalled lease is empty.
    Evacuated { lease: LeaseId, lender: HostName },
    /// The agent could not empty the recalled lease.
    EvacuationFailed { lease: LeaseId, lender: HostName, why: String },
    /// Keeps second copies of a lease's pages on another lease.
    Copies { of: LeaseId, lease: LeaseId, lender: HostName, bytes: Bytes },
    /// The engine could not begin the second copy.
    CopyFailed { lease: LeaseId, lender: HostName, why: String },
    /// No host has room for second copies of a lease's pages.
    LacksCopy { lease: LeaseId, lender: HostName, bytes: Bytes },
    /// Lenders did not grant enough to replace a lease with an old key.
    KeepsKey { lease: LeaseId, lender: HostName, bytes: Bytes, got: Bytes },
    /// The lender of the lease is gone, and a second copy has its pages.
    Abandoned { lease: LeaseId, lender: HostName },
    /// Grants a request.
    Grants {
        borrower: HostName,
        lease: LeaseId,
        bytes: Bytes,
        owner: Owner,
        goes_first: bool,
        spare: Bytes,
        shareable: Bytes,
        /// The ledger, if it limited `spare`.
        ledger: Option<Ledger>,
    },
    /// Sends `mem_bor_rej`.
    Rejects {
        borrower: HostName,
        bytes: Bytes,
        owner: Owner,
        goes_first: bool,
        spare: Bytes,
        reason: Reason,
        /// The ledger, if it limited `spare`.
        ledger: Option<Ledger>,
    },
    /// The agent could not set up a granted lease.
    OpenFailed { borrower: HostName, lease: LeaseId, why: String },
    /// Sends `mem_len_fin`.
    Recalls {
        borrower: HostName,
        lease: LeaseId,
        stored: Bytes,
        /// The use of memory expected after the recall.
        expected: Bytes,
        because: Because,
    },
    /// The borrower sent `mem_bor_fin`.
    Frees { borrower: HostName, lease: LeaseId, stored: Bytes },
    /// The grace of a silent borrower is over.
    Expires { borrower: HostName, lease: LeaseId, stored: Bytes, silent: Duration },
    /// Lets another host use the lease, as the borrower may be moving the region there.
    Permits { borrower: HostName, lease: LeaseId, to: HostName },
    /// The lease has moved with its region.
    PassesOn { from: HostName, to: HostName, lease: LeaseId },
    /// The agent could not write down which hosts may use the lease.
    RecordFailed { lease: LeaseId, why: String },
    /// The region is on another host now.
    MovedAway { region: RegionName, volume: VolumeId, to: HostName, leases: usize },
    /// The region has come from another host.
    Arrived { region: RegionName, volume: VolumeId, leases: usize },
    /// A message about a lease came from a host that has no part in it, or no longer.
    Stranger { from: HostName, lease: LeaseId },
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::RoleChanged { from, to } => {
                write!(f, "was {from}, is {to} now: {}", self.state())
            }
            What::Frees { .. }
            | What::Expires { .. }
            | What::Recalls { .. }
            | What::OpenFailed { .. } => self.lender(f),
            What::Grants { .. } | What::Rejects { .. } | What::Stranger { .. } => self.lender(f),
            What::Permits { .. } | What::PassesOn { .. } | What::RecordFailed { .. } => {
                self.lender(f)
            }
            What::Asks { .. } | What::GivesUp { .. } | What::Rejected { .. } | What::Got { .. } => {
                self.asking(f)
            }
            What::Refused { .. } => self.asking(f),
            What::NobodyLends { .. } | What::Abandons { .. } | What::BorrowRefused { .. } => {
                self.asking(f)
            }
            _ => self.borrower(f),
        }
    }
}

impl Decision {
    fn lender(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::Grants {
                borrower,
                lease,
                bytes,
                owner,
                goes_first,
                spare,
                shareable,
                ledger,
            } => write!(
                f,
                "grants {bytes} to {borrower}{}{} as lease {lease}: {spare} of {shareable} \
                 shareable is free{}, {}",
                For(owner),
                First(*goes_first),
                Limit(ledger.as_ref()),
                self.state()
            ),
            What::Rejects { borrower, bytes, owner, goes_first, spare, reason, ledger } => write!(
                f,
                "rejects the request of {borrower} for {bytes}{}{}, because {}: {spare} to \
                 spare{}, {}",
                For(owner),
                First(*goes_first),
                Own(*reason),
                Limit(ledger.as_ref()),
                self.state()
            ),
            What::OpenFailed { borrower, lease, why } => {
                write!(f, "cannot set up lease {lease} for {borrower}: {why}")
            }
            What::Recalls { borrower, lease, stored, expected, because } => {
                write!(f, "asks {borrower} to vacate lease {lease}, which holds {stored}: ")?;
                match because {
                    Because::Overload => {
                        write!(f, "{}, {expected} expected afterwards", self.overload())
                    }
                    Because::Drain => f.write_str("this host is draining"),
                    Because::Parted => write!(f, "{borrower} is no longer a peer of this host"),
                    Because::OwnVms => f.write_str("VMs of this host need the memory"),
                    Because::GoesFirst => {
                        f.write_str("others need the memory, and second copies go first")
                    }
                }
            }
            What::Frees { borrower, lease, stored } => {
                write!(f, "frees lease {lease} with {stored}: {borrower} gives it back")
            }
            What::Expires { borrower, lease, stored, silent } => write!(
                f,
                "frees lease {lease} with {stored}, which {borrower} did not give back: \
                 no sign of {borrower} for {silent:?}"
            ),
            What::Stranger { from, lease } => {
                write!(f, "ignores {from}: lease {lease} belongs to other hosts")
            }
            What::Permits { borrower, lease, to } => write!(
                f,
                "lets {to} use lease {lease}: {borrower} is about to move the region there"
            ),
            What::PassesOn { from, to, lease } => {
                write!(f, "lends lease {lease} to {to} now: its region has moved there from {from}")
            }
            What::RecordFailed { lease, why } => {
                write!(f, "cannot record yet which host may use lease {lease}: {why}")
            }
            _ => Ok(()),
        }
    }

    fn asking(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::Asks { lender, bytes, cause, owner, copy_of, instead_of } => {
                write!(f, "asks {lender} for {bytes}{}: ", For(owner))?;
                if let Some(of) = copy_of {
                    return write!(f, "lease {of} needs a second copy of its pages");
                }
                if let Some(lease) = instead_of {
                    return write!(f, "the pages in lease {lease} must move");
                }
                match cause {
                    Some(Cause::Overload) => f.write_str(&self.overload()),
                    Some(Cause::ByHand) if owner.is_swap() => {
                        f.write_str("the operator ordered it")
                    }
                    Some(Cause::ByHand) => f.write_str("the region needs a place for its pages"),
                    None => f.write_str("pages must move"),
                }
            }
            What::GivesUp { lender, bytes, waited } => {
                write!(f, "stops asking {lender} for {bytes}: no answer for {waited:?}")
            }
            What::Rejected { lender, bytes, spare, reason } => {
                write!(f, "gets no {bytes} from {lender}: {reason}; it could spare {spare}")
            }
            What::Refused { lender, bytes, why } => {
                write!(f, "gets no {bytes} from {lender}, which refuses the request: {why}")
            }
            What::Got { lender, lease, bytes, missing } => {
                write!(f, "borrows {bytes} from {lender} as lease {lease}: {missing} still missing")
            }
            What::NobodyLends { wanted, cause, retry } => {
                write!(f, "finds no lender for {wanted}")?;
                match cause {
                    Cause::Overload => match retry {
                        Some(retry) => write!(f, ", asks again in {retry:?}: {}", self.overload()),
                        None => write!(f, ", asks the first that can lend: {}", self.overload()),
                    },
                    Cause::ByHand => write!(f, ", which the operator ordered"),
                }
            }
            What::Abandons { wanted, got, .. } => write!(
                f,
                "no longer needs the {wanted} it asked for, gives back the {got} it got: {}",
                self.state()
            ),
            What::BorrowRefused { bytes, refusal, .. } => match refusal {
                Refusal::Lending => {
                    write!(f, "does not borrow {bytes}: it lends, and no host does both")
                }
                Refusal::Asking => {
                    write!(f, "does not borrow {bytes}: it is asking for memory already")
                }
                Refusal::Nothing => {
                    write!(f, "does not borrow: the order must be for at least one byte")
                }
                Refusal::OverMax { borrowed, max } => write!(
                    f,
                    "does not borrow {bytes}: it has borrowed or asked for {borrowed} already, \
                     and borrow.max is {max}"
                ),
            },
            _ => Ok(()),
        }
    }

    fn borrower(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::Activates { volume, leases, bytes, wanted, .. } => {
                write!(
                    f,
                    "makes volume {volume} of {bytes}, of {wanted} wanted, over {leases} lease(s)"
                )
            }
            What::ActivationFailed { volume, why } => {
                write!(f, "cannot make volume {volume}: {why}")
            }
            What::Provides { region, leases, bytes, .. } => {
                write!(f, "hands {bytes} in {leases} lease(s) to region {region}")
            }
            What::Lacks { region, wanted, got, refusal, .. } => {
                write!(f, "has no {wanted} for region {region}")?;
                match refusal {
                    Some(Refusal::OverMax { borrowed, max }) => {
                        write!(f, ": it has borrowed {borrowed} already, and borrow.max is {max}")
                    }
                    Some(_) => f.write_str(": the request must be for at least one byte"),
                    None => write!(f, ": hosts lend {got}, which go back"),
                }
            }
            What::Unclaimed { region, why, .. } => {
                write!(f, "takes back the memory for region {region}: {why}")
            }
            What::RegionGone { region, leases, .. } => {
                write!(f, "gives back {leases} lease(s) of region {region}, which is gone")
            }
            What::MovedAway { region, to, leases, .. } => {
                write!(f, "leaves {leases} lease(s) to {to}, where region {region} is now")
            }
            What::Arrived { region, leases, .. } => {
                write!(f, "takes over {leases} lease(s) of region {region}, which has come here")
            }
            What::Unwanted { lender, lease } => {
                write!(f, "gives lease {lease} back to {lender}: this host does not use it")
            }
            What::Deactivates { volume, bytes, by_hand: true } => {
                write!(f, "gives back volume {volume} of {bytes}: the operator ordered it")
            }
            What::Deactivates { volume, bytes, by_hand: false } => write!(
                f,
                "gives back volume {volume} of {bytes}: used {} and {} swapped out are below \
                 {} of {} ({})",
                self.memory.used,
                self.memory.swap_used,
                percent(self.lower),
                self.memory.total,
                self.memory.total.scaled(self.lower)
            ),
            What::DeactivationFailed { volume, why } => {
                write!(f, "cannot give back volume {volume}: {why}")
            }
            What::Deactivated { volume, leases } => {
                write!(f, "removed volume {volume} and gives back {leases} lease(s)")
            }
            What::Finishes { lender, lease } => write!(f, "gives lease {lease} back to {lender}"),
            What::FinDropped { lender, lease } => write!(
                f,
                "no longer tells {lender} that lease {lease} is free: no answer for the whole \
                 grace, after which {lender} frees it"
            ),
            What::Recalled { lender, lease, bytes } => {
                write!(f, "must vacate lease {lease} of {bytes}, which {lender} recalls")
            }
            What::Evacuates { lease, lender, bytes, onto } => write!(
                f,
                "moves the pages in lease {lease} ({bytes}) of {lender} elsewhere, \
                 with {onto} borrowed for them"
            ),
            What::Copies { of, lease, lender, bytes } => write!(
                f,
                "keeps second copies of the pages in lease {of} at {lender}, in lease {lease} of \
                 {bytes}"
            ),
            What::CopyFailed { lease, lender, why } => {
                write!(f, "cannot keep second copies in lease {lease} of {lender}: {why}")
            }
            What::LacksCopy { lease, lender, bytes } => write!(
                f,
                "has one copy only of the pages in lease {lease} of {lender}: no other host grants \
                 {bytes}, or borrow.max is reached"
            ),
            What::KeepsKey { lease, lender, bytes, got } => write!(
                f,
                "keeps lease {lease} of {lender} with its key: of {bytes}, lenders granted {got} \
                 to replace it"
            ),
            What::Abandoned { lease, lender } => write!(
                f,
                "moves the pages in lease {lease} elsewhere: {lender} does not answer or has lost \
                 them, and a second copy has them all"
            ),
            What::Evacuated { lease, lender } => write!(f, "vacated lease {lease} of {lender}"),
            What::EvacuationFailed { lease, lender, why } => {
                write!(f, "cannot vacate lease {lease} of {lender} yet: {why}")
            }
            _ => Ok(()),
        }
    }

    /// Describes the reading, with the upper threshold.
    fn state(&self) -> String {
        let Memory { used, total, swap_used, .. } = self.memory;
        let limit = total.scaled(self.upper);
        format!("used {used} of {total}, {swap_used} swapped out, overloaded above {limit}")
    }

    /// Describes why the host is overloaded.
    fn overload(&self) -> String {
        let Memory { used, total, pressure, .. } = self.memory;
        let limit = total.scaled(self.upper);
        let upper = percent(self.upper);
        if used > limit {
            format!("used {used} of {total} is above {upper} ({limit})")
        } else if pressure {
            format!(
                "programs wait for memory at used {used} of {total}, although below {upper} \
                 ({limit})"
            )
        } else {
            self.state()
        }
    }
}

fn percent(share: f64) -> String {
    format!("{} %", (share * 1000.0).round() / 10.0)
}

/// The region that the memory is for, if it is for one.
struct For<'a>(&'a Owner);

impl fmt::Display for For<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Owner::Swap => Ok(()),
            Owner::Region(region) => write!(f, " for region {region}"),
        }
    }
}

/// That a lease is for second copies that go first; nothing otherwise.
struct First(bool);

impl fmt::Display for First {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 { f.write_str(" (second copies that go first)") } else { Ok(()) }
    }
}

/// The ledger's figures, if it limited what the host can spare; nothing otherwise.
struct Limit<'a>(Option<&'a Ledger>);

impl fmt::Display for Limit<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(ledger) = self.0 else { return Ok(()) };
        let Ledger { total, reserved, free, overcommitted, .. } = ledger;
        write!(f, " by the ledger (of {total}, {reserved} is reserved")?;
        let promised = [
            (ledger.vm_floor.saturating_add(ledger.vm_elastic), "promised to VMs"),
            (ledger.cache_floor, "promised to caches"),
            (ledger.group_surplus, "promised to groups"),
            (ledger.lent, "lent"),
            (ledger.mirror, "lent for second copies"),
        ];
        for (bytes, what) in promised.into_iter().filter(|(bytes, _)| *bytes > Bytes::ZERO) {
            write!(f, ", {bytes} {what}")?;
        }
        match *overcommitted {
            Bytes::ZERO => write!(f, ", {free} free)"),
            over => write!(f, ", {over} too much)"),
        }
    }
}

/// A reason as the host that gives it writes it.
struct Own(Reason);

impl fmt::Display for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Reason::Borrowing => f.write_str("no host lends while it borrows"),
            Reason::Asking => f.write_str("no host lends while it asks"),
            Reason::Draining => f.write_str("this host is draining"),
            Reason::NoRoom => f.write_str("this host cannot spare that much"),
            Reason::Starting => f.write_str("this host has not read its memory yet"),
            Reason::Recalling => f.write_str("this host is recalling leases"),
            Reason::Failed => f.write_str("this host could not set up the lease"),
            Reason::Overloaded | Reason::Settled | Reason::Invalid => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_says_its_numbers() {
        let memory = Memory { total: Bytes::mib(256), used: Bytes::mib(213), ..Memory::default() };
        let what = What::Asks {
            lender: "b".parse().unwrap(),
            bytes: Bytes::mib(512),
            cause: Some(Cause::Overload),
            owner: Owner::Swap,
            copy_of: None,
            instead_of: None,
        };
        let decision = Decision { at: Duration::ZERO, memory, upper: 0.8, lower: 0.6, what };
        assert_eq!(
            decision.to_string(),
            "asks b for 512MiB: used 213MiB of 256MiB is above 80 % (204.8MiB)"
        );
        let json = serde_json::to_value(&decision).unwrap();
        assert_eq!((&json["what"], &json["lender"]), (&"asks".into(), &"b".into()));
    }

    #[test]
    fn an_early_signal_is_told_apart_from_use_above_the_threshold() {
        let memory = Memory {
            total: Bytes::mib(256),
            used: Bytes::mib(100),
            pressure: true,
            ..Memory::default()
        };
        let what = What::NobodyLends {
            wanted: Bytes::gib(1),
            cause: Cause::Overload,
            retry: Some(Duration::from_secs(30)),
        };
        let text =
            Decision { at: Duration::ZERO, memory, upper: 0.8, lower: 0.6, what }.to_string();
        assert!(text.contains("programs wait for memory at used 100MiB of 256MiB"), "{text}");
    }
}
