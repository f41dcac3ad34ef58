//! The VMs of a scenario: how many, how large, and where their memory is.

use aquifer_page::{Bytes, EXTENT_SIZE, NameError, RegionName};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::{Load, Synthetic};

/// The share of a VM's memory that its local cache holds.
const CACHE: f64 = 0.75;

/// The share of VMs whose memory is RAM of their host.
const LOCAL: f64 = 0.4;

/// The share of VMs whose memory is in leases.
const BORROWED: f64 = 0.3;

/// Keeps the draws for VMs apart from those for the demand of programs.
const SALT: u64 = 0x766d;

/// A VM at the start of a simulation.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// The name, unique in the cluster.
    pub name: RegionName,
    /// The size of its memory.
    pub size: Bytes,
    /// The most that its host's RAM holds of it.
    pub cache: Bytes,
    /// The holder of all other pages.
    pub backing: Backing,
    /// The memory that its guest uses, up to its size.
    pub load: Load,
    /// The share of the pages in its cache that a move must copy.
    pub dirty: f64,
}

/// The holder of the pages of a VM that are not in its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// None: all of its memory is RAM of its host, and it cannot move.
    Local,
    /// Leases of the cluster's hosts, which move with it.
    Borrowed,
    /// Lenders outside the cluster, which always answer.
    Outside,
}

/// Returns VMs with synthetic load, `each` for each of these hosts, named `vm0`, `vm1` and so on.
/// Their mean size is `size`; the smallest has half of it, the largest three halves. The same seed
/// gives the same VMs, whatever else happens in the simulation.
///
/// # Errors
/// If a number of this size does not fit into a name.
pub fn synthetic_vms(
    hosts: usize,
    each: usize,
    size: Bytes,
    seed: u64,
) -> Result<Vec<Vec<VmSpec>>, NameError> {
    let mut rng = SmallRng::seed_from_u64(seed ^ SALT);
    let width = (hosts * each).saturating_sub(1).to_string().len();
    let mut of_host = |host| {
        let names = (0..each).map(|place| format!("vm{:0width$}", host * each + place).parse());
        names.map(|name| Ok(VmSpec::draw(name?, size, &mut rng))).collect()
    };
    (0..hosts).map(&mut of_host).collect()
}

impl VmSpec {
    fn draw(name: RegionName, mean: Bytes, rng: &mut SmallRng) -> Self {
        let extents = mean.scaled(rng.random_range(0.5..1.5)).0 / EXTENT_SIZE;
        let size = Bytes(extents.max(1) * EXTENT_SIZE);
        let backing = match rng.random::<f64>() {
            share if share < LOCAL => Backing::Local,
            share if share < LOCAL + BORROWED => Backing::Borrowed,
            _ => Backing::Outside,
        };
        let cache = match backing {
            Backing::Local => size,
            Backing::Borrowed | Backing::Outside => size.scaled(CACHE).round_up_to_extents(),
        };
        let load = Load::Synthetic(Box::new(Synthetic::new(size, rng.random())));
        Self { name, size, cache, backing, load, dirty: rng.random_range(0.2..1.0) }
    }
}
