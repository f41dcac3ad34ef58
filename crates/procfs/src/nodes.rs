//! The NUMA nodes of this host, under `/sys/devices/system/node` (numa(7)).

use std::fs;
use std::io;
use std::path::Path;

use aquifer_page::Bytes;

use crate::{invalid, number, read, words};

/// A node: processors, and the memory that is near to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Number of the node.
    pub number: u32,
    /// Its processors; none if it has only memory.
    pub processors: Vec<u32>,
    /// Memory that programs can allocate there without swapping.
    pub available: Bytes,
}

/// Returns all nodes with memory or processors, by number. A kernel without NUMA has none.
/// `huge_pages` counts only free huge pages of this size as available.
pub fn nodes(huge_pages: Option<Bytes>) -> io::Result<Vec<Node>> {
    nodes_in(Path::new("/sys/devices/system/node"), huge_pages)
}

/// Returns the numbers of the nodes whose memory this process may use.
pub fn allowed() -> io::Result<Vec<u32>> {
    let file = Path::new("/proc/self/status");
    let text = read(file)?;
    let found = words(&text).find(|(name, _)| *name == "Mems_allowed_list");
    let list = found.ok_or_else(|| invalid("/proc/self/status has no 'Mems_allowed_list'".into()));
    list.and_then(|(_, list)| numbers_in(file, list))
}

fn nodes_in(dir: &Path, huge_pages: Option<Bytes>) -> io::Result<Vec<Node>> {
    let online = dir.join("online");
    if !fs::exists(&online)? {
        return Ok(Vec::new());
    }
    let node = |number| {
        let dir = dir.join(format!("node{number}"));
        let available = match huge_pages {
            None => available(&dir),
            Some(page) => available_huge(&dir, page),
        };
        Ok(Node { number, processors: numbers(&dir.join("cpulist"))?, available: available? })
    };
    numbers(&online)?.into_iter().map(node).collect()
}

/// Returns the size of the huge pages of this size that are free on a node.
fn available_huge(dir: &Path, page: Bytes) -> io::Result<Bytes> {
    let pages = dir.join(format!("hugepages/hugepages-{}kB", page.0 >> 10));
    let free = if fs::exists(&pages)? { number(pages.join("free_hugepages"))? } else { 0 };
    Ok(Bytes(free.saturating_mul(page.0)))
}

/// Returns the size of the pages of a node that are free, or that cache files.
fn available(dir: &Path) -> io::Result<Bytes> {
    let file = dir.join("meminfo");
    let text = read(&file)?;
    let size = |name: &str| {
        let found = text.lines().find_map(|line| {
            // Each line begins with `Node N`.
            words(line.splitn(3, ' ').nth(2)?).find(|(found, _)| *found == name)
        });
        let size = found.and_then(|(_, size)| size.parse().ok()).map(Bytes::kib);
        size.ok_or_else(|| invalid(format!("{} has no line '{name}'", file.display())))
    };
    Ok(size("MemFree")? + size("Active(file)")? + size("Inactive(file)")?)
}

/// Reads a file that lists numbers, as `0-3,8`.
fn numbers(path: &Path) -> io::Result<Vec<u32>> {
    numbers_in(path, &read(path)?)
}

/// Returns the numbers in such a list, which a file contains.
fn numbers_in(path: &Path, text: &str) -> io::Result<Vec<u32>> {
    let malformed = || invalid(format!("{} holds '{}', no list", path.display(), text.trim()));
    let mut all = Vec::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse::<u32>().map_err(|_| malformed());
        all.extend(number(first)?..=number(last)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, number: u32, cpulist: &str, free: u64) {
        let node = dir.join(format!("node{number}"));
        fs::create_dir(&node).unwrap();
        fs::write(node.join("cpulist"), format!("{cpulist}\n")).unwrap();
        let line = |name: &str, kib: u64| format!("Node {number} {name}:   {kib} kB\n");
        let text = [("MemTotal", 4096), ("MemFree", free), ("Active(file)", 8)]
            .map(|(name, kib)| line(name, kib))
            .concat();
        fs::write(node.join("meminfo"), text + &line("Inactive(file)", 16)).unwrap();
    }

    #[test]
    fn nodes_have_processors_and_available_memory() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(nodes_in(dir.path(), None).unwrap(), [], "a kernel without NUMA");
        fs::write(dir.path().join("online"), "0,2-3\n").unwrap();
        for (number, cpulist, free) in [(0, "0-2,8", 1000), (2, "3", 2000), (3, "", 0)] {
            write(dir.path(), number, cpulist, free);
        }
        let node = |number, processors: &[u32], kib| Node {
            number,
            processors: processors.to_vec(),
            available: Bytes::kib(kib),
        };
        let expected = [node(0, &[0, 1, 2, 8], 1024), node(2, &[3], 2024), node(3, &[], 24)];
        assert_eq!(nodes_in(dir.path(), None).unwrap(), expected);
        let huge = dir.path().join("node2/hugepages/hugepages-2048kB");
        fs::create_dir_all(&huge).unwrap();
        fs::write(huge.join("free_hugepages"), "3\n").unwrap();
        let found = nodes_in(dir.path(), Some(Bytes::mib(2))).unwrap();
        let available: Vec<_> = found.iter().map(|node| node.available).collect();
        assert_eq!(available, [Bytes::ZERO, Bytes::mib(6), Bytes::ZERO]);
        fs::write(dir.path().join("node2/cpulist"), "many").unwrap();
        let error = nodes_in(dir.path(), None).unwrap_err().to_string();
        assert!(error.ends_with("node2/cpulist holds 'many', no list"), "{error}");
        fs::write(dir.path().join("node2/cpulist"), "1").unwrap();
        fs::write(dir.path().join("node2/meminfo"), "Node 2 MemFree: 1 kB\n").unwrap();
        let error = nodes_in(dir.path(), None).unwrap_err().to_string();
        assert!(error.ends_with("node2/meminfo has no line 'Active(file)'"), "{error}");
    }

    #[test]
    fn this_hosts_nodes_have_all_of_its_processors() {
        let nodes = nodes(None).unwrap();
        let processors = nodes.iter().map(|node| node.processors.len()).sum::<usize>();
        let all = std::thread::available_parallelism().unwrap().get();
        assert!(nodes.is_empty() || processors >= all, "{nodes:?}");
        let is_there = |number: &u32| nodes.iter().any(|node| node.number == *number);
        assert!(nodes.is_empty() || allowed().unwrap().iter().any(is_there), "{nodes:?}");
    }
}
