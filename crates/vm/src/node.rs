//! The NUMA node whose memory and processors a VM uses.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use aquifer_page::Bytes;
use aquifer_procfs::{Node, nodes};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::error::VmError;

/// The choice of a VM's node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeChoice {
    /// Of the nodes on which the VM fits, the one with the fewest vCPUs per processor; of equal
    /// ones the one with the most available memory.
    #[default]
    Auto,
    /// None: the kernel chooses the place of each page and of each vCPU.
    Any,
    /// This one.
    #[serde(untagged)]
    Number(u32),
}

impl FromStr for NodeChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "any" => Ok(Self::Any),
            number => number
                .parse()
                .map(Self::Number)
                .map_err(|_| format!("'{text}' is neither 'auto', 'any' nor a node's number")),
        }
    }
}

impl fmt::Display for NodeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Any => f.write_str("any"),
            Self::Number(number) => write!(f, "{number}"),
        }
    }
}

/// What a VM needs of a node.
#[derive(Clone, Debug)]
pub(crate) struct Need {
    /// RAM of this host.
    pub(crate) memory: Bytes,
    /// Size of the huge pages that it consists of, if any.
    pub(crate) huge_pages: Option<Bytes>,
    /// Number of vCPUs.
    pub(crate) cpus: u32,
    /// The vCPUs of other VMs, by their nodes.
    pub(crate) others: BTreeMap<u32, u64>,
}

impl Need {
    /// Returns the vCPUs of other VMs for a thousand processors of a node.
    fn load(&self, node: &Node) -> u64 {
        let others = self.others.get(&node.number).copied().unwrap_or_default();
        others * 1000 / node.processors.len().max(1) as u64
    }
}

impl NodeChoice {
    pub(crate) fn is_auto(&self) -> bool {
        *self == Self::Auto
    }

    /// Returns the choice on another host, where the nodes have other numbers.
    pub(crate) fn elsewhere(self) -> Self {
        if let Self::Number(_) = self { Self::Auto } else { self }
    }

    /// Chooses among this host's nodes, by the processors that this process may use. `None` leaves
    /// the choice to the kernel.
    ///
    /// # Errors
    /// [`VmError::Misuse`] if there is no node of that number with processors.
    pub(crate) fn choose(self, need: Need) -> Result<Option<Node>, VmError> {
        if self == Self::Any {
            return Ok(None);
        }
        let found = nodes::nodes(need.huge_pages)
            .and_then(|nodes| Ok(usable(nodes, &sched_getaffinity(None)?, &nodes::allowed()?)));
        match (self, found) {
            (_, Ok(nodes)) => self.among(nodes, &need),
            (Self::Number(_), Err(error)) => Err(VmError::io("cannot list the NUMA nodes")(error)),
            (_, Err(error)) => {
                tracing::warn!("the kernel chooses the VM's NUMA node: {error}");
                Ok(None)
            }
        }
    }

    fn among(self, mut nodes: Vec<Node>, need: &Need) -> Result<Option<Node>, VmError> {
        match self {
            Self::Number(number) => {
                let numbers: Vec<_> = nodes.iter().map(|node| node.number.to_string()).collect();
                let found = nodes.into_iter().find(|node| node.number == number);
                found.map(Some).ok_or_else(|| {
                    let numbers = numbers.join(", ");
                    VmError::Misuse(format!(
                        "this host has no NUMA node {number} with processors and memory that the \
                         VM may use, but these: {numbers}. Give one of them with --node, or 'auto'"
                    ))
                })
            }
            Self::Auto if nodes.len() > 1 => {
                nodes.retain(|node| {
                    node.available >= need.memory && node.processors.len() >= need.cpus as usize
                });
                Ok(nodes.into_iter().max_by_key(|node| (Reverse(need.load(node)), node.available)))
            }
            Self::Auto | Self::Any => Ok(None),
        }
    }
}

/// Returns those of the nodes with memory in `memory` that have processors among these, without
/// their other processors.
fn usable(mut nodes: Vec<Node>, processors: &CpuSet, memory: &[u32]) -> Vec<Node> {
    let may_use = |number: &u32| {
        let number = *number as usize;
        number < CpuSet::MAX_CPU && processors.is_set(number)
    };
    nodes.iter_mut().for_each(|node| node.processors.retain(may_use));
    nodes.retain(|node| !node.processors.is_empty() && memory.contains(&node.number));
    nodes
}

/// Runs `start` on the processors of a node. The processes that it starts stay there. If the kernel
/// refuses that, they run on all processors.
pub(crate) fn start_on<T>(node: Option<&Node>, start: impl FnOnce() -> T) -> T {
    let (Some(node), Ok(before)) = (node, sched_getaffinity(None)) else { return start() };
    let mut processors = CpuSet::new();
    node.processors.iter().for_each(|number| processors.set(*number as usize));
    let stay_on = |processors| {
        if let Err(error) = sched_setaffinity(None, processors) {
            tracing::warn!("cannot choose processors by NUMA node {}: {error}", node.number);
        }
    };
    stay_on(&processors);
    let started = start();
    stay_on(&before);
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(others: &[(u32, u64)]) -> Need {
        let others = others.iter().copied().collect();
        Need { memory: Bytes::gib(4), huge_pages: None, cpus: 2, others }
    }

    fn node(number: u32, processors: &[u32], gib: u64) -> Node {
        Node { number, processors: processors.to_vec(), available: Bytes::gib(gib) }
    }

    fn chosen(choice: NodeChoice, nodes: &[Node]) -> Option<u32> {
        choice.among(nodes.to_vec(), &need(&[])).unwrap().map(|node| node.number)
    }

    #[test]
    fn the_node_with_most_memory_is_chosen_if_the_vm_fits() {
        let nodes = [node(0, &[0, 1], 5), node(1, &[2, 3], 6), node(2, &[4], 9)];
        assert_eq!(chosen(NodeChoice::Auto, &nodes), Some(1));
        assert_eq!(chosen(NodeChoice::Auto, &nodes[..1]), None, "the only node");
        assert_eq!(chosen(NodeChoice::Any, &nodes), None);
        assert_eq!(chosen(NodeChoice::Number(2), &nodes), Some(2));
        let small = [node(0, &[0, 1], 3), node(1, &[2, 3], 2)];
        assert_eq!(chosen(NodeChoice::Auto, &small), None, "the VM fits on no node");
        let refused =
            NodeChoice::Number(7).among(nodes.to_vec(), &need(&[])).unwrap_err().to_string();
        assert!(refused.contains("no NUMA node 7") && refused.contains("0, 1, 2"), "{refused}");
    }

    #[test]
    fn vms_spread_over_the_nodes() {
        let nodes = [node(0, &[0, 1, 2, 3], 50), node(1, &[4, 5], 90)];
        let chosen = |others: &[(u32, u64)]| {
            let node = NodeChoice::Auto.among(nodes.to_vec(), &need(others)).unwrap();
            node.unwrap().number
        };
        assert_eq!(chosen(&[(1, 1)]), 0);
        assert_eq!(chosen(&[(1, 1), (0, 1)]), 0, "it has more processors");
        assert_eq!(chosen(&[(1, 1), (0, 2)]), 1, "equal, and more memory");
        assert_eq!(chosen(&[(1, 1), (0, 3)]), 1);
    }

    #[test]
    fn only_processors_that_the_process_may_use_count() {
        let mut processors = CpuSet::new();
        [1, 2, 3].iter().for_each(|number| processors.set(*number));
        let nodes = vec![node(0, &[0, 1], 1), node(1, &[0, 4, 4096], 1), node(2, &[2, 3], 1)];
        let expected = [node(0, &[1], 1), node(2, &[2, 3], 1)];
        assert_eq!(usable(nodes.clone(), &processors, &[0, 1, 2]), expected);
        assert_eq!(usable(nodes, &processors, &[1, 2]), expected[1..], "a cpuset's memory");
    }

    #[test]
    fn a_process_stays_on_the_node_on_which_it_starts() {
        let before = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|number| before.is_set(*number)).unwrap();
        let node = node(0, &[first as u32], 1);
        let start = || {
            let status = std::process::Command::new("grep")
                .args(["Cpus_allowed_list", "/proc/self/status"])
                .output();
            String::from_utf8(status.unwrap().stdout).unwrap()
        };
        let allowed = start_on(Some(&node), start);
        assert_eq!(allowed.split_whitespace().nth(1).unwrap(), first.to_string());
        assert!(sched_getaffinity(None).unwrap() == before);
        assert_eq!(start_on(None, || 1), 1);
    }

    #[test]
    fn a_choice_is_written_as_it_is_read() {
        for choice in [NodeChoice::Auto, NodeChoice::Any, NodeChoice::Number(3)] {
            let json = serde_json::to_string(&choice).unwrap();
            assert_eq!(serde_json::from_str::<NodeChoice>(&json).unwrap(), choice);
        }
        assert!("-1".parse::<NodeChoice>().unwrap_err().contains("neither 'auto'"));
    }
}
