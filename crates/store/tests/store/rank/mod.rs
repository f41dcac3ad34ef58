//! Statistics that decide whether times distinguish two kinds of pages.

/// Returns the probability that a time of `these` exceeds one of `those`, with ties counted half.
///
/// 0.5 means that the times do not distinguish them (Mann and Whitney 1947).
pub fn auc(these: &[u64], those: &[u64]) -> f64 {
    let mut all: Vec<(u64, bool)> = these.iter().map(|time| (*time, true)).collect();
    all.extend(those.iter().map(|time| (*time, false)));
    all.sort_unstable();
    let (mut longer, mut shorter) = (0.0, 0.0);
    for equal in all.chunk_by(|one, other| one.0 == other.0) {
        let ours = equal.iter().filter(|(_, is_ours)| *is_ours).count() as f64;
        let others = equal.len() as f64 - ours;
        longer += ours * (shorter + others / 2.0);
        shorter += others;
    }
    longer / (these.len() as f64 * those.len() as f64)
}

/// Repeats a measurement up to three times until one is good; panics if none is.
///
/// Other programs disturb single runs. `measured` receives the number of the attempt.
pub fn at_best<T: std::fmt::Debug>(
    mut measured: impl FnMut(u64) -> T,
    is_good: impl Fn(&T) -> bool,
) {
    let mut all = Vec::new();
    while !all.last().is_some_and(&is_good) {
        assert!(all.len() < 3, "{all:?}");
        all.push(measured(all.len() as u64));
        eprintln!("{:?}", all.last());
    }
}

/// Returns the numbers below `end` in a pseudo-random order that depends on `seed`.
///
/// A measurement must not depend on the order of its predecessors.
pub fn by_chance(end: u64, seed: u64) -> Vec<u64> {
    let mut all: Vec<u64> = (0..end).collect();
    let mut state = seed | 1;
    for at in (1..all.len()).rev() {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        all.swap(at, (state >> 33) as usize % (at + 1));
    }
    all
}

/// The largest deviation of a rank from one half by chance, with thousands of pages of each kind.
pub const CHANCE: f64 = 0.06;
