//! A parser of the kernel's trace (kernel's trace/ftrace.rst and trace/kprobetrace.rst), without
//! I/O.

use std::collections::HashMap;

use super::stages::{IN, KNOWN, Known, OUT};
use crate::message::Stage;

/// The content of a trace.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Told {
    /// The stages that occurred, in the order of [`KNOWN`].
    pub(super) stages: Vec<Stage>,
    /// Whether a stage has begun and not ended.
    pub(super) open: bool,
    /// Events that were dropped for want of room.
    pub(super) lost: u64,
}

/// A function that a task has entered.
struct Frame {
    stage: usize,
    since_us: u64,
    counts: bool,
}

/// Sums the times of each stage. Entry and return are paired by task and stage.
///
/// A stage within another one of the same task is part of it, and is not counted by itself. For
/// example, removing a section tears down the memory map's page tables by the function that does so
/// for all memory. A stage that `encloses` others contains their times, and they are counted as
/// well.
pub(super) fn parse(text: &str) -> Told {
    let mut told = Told::default();
    let mut sums = [(0, 0); KNOWN.len()];
    let mut tasks: HashMap<&str, Vec<Frame>> = HashMap::new();
    for line in text.lines() {
        if line.starts_with('#') {
            told.lost += lost(line).unwrap_or(0);
            continue;
        }
        let Some(Event { task, at_us, name }) = event(line) else { continue };
        let frames = tasks.entry(task).or_default();
        if let Some(stage) = name.strip_prefix(IN).and_then(index) {
            let counts = !frames
                .iter()
                .any(|frame| frame.stage == stage || inside(&KNOWN[frame.stage], stage));
            frames.push(Frame { stage, since_us: at_us, counts });
        } else if let Some(stage) = name.strip_prefix(OUT).and_then(index)
            && let Some(depth) = frames.iter().rposition(|frame| frame.stage == stage)
        {
            // The kernel may have missed the returns of the frames above it.
            let frame = frames.drain(depth..).next();
            if let Some(frame) = frame.filter(|frame| frame.counts) {
                sums[stage].0 += at_us.saturating_sub(frame.since_us);
                sums[stage].1 += 1;
            }
        }
    }
    told.open = tasks.values().any(|frames| !frames.is_empty());
    let seen = KNOWN.iter().zip(sums).filter(|(_, (_, count))| *count > 0);
    told.stages = seen
        .map(|(known, (us, count))| Stage {
            name: known.name.to_owned(),
            took_us: us as f64,
            count,
        })
        .collect();
    told
}

/// Returns whether a stage within `outer` is part of it.
fn inside(outer: &Known, stage: usize) -> bool {
    !outer.encloses && !KNOWN[stage].encloses
}

fn index(name: &str) -> Option<usize> {
    KNOWN.iter().position(|known| known.name == name)
}

struct Event<'a> {
    /// Name and number of the task. The name may contain any characters, blanks too.
    task: &'a str,
    at_us: u64,
    name: &'a str,
}

/// Parses `     kworker/0:1-9       [000] d....   123.456789: in_onlining:
/// (online_pages+0x0/0x3d0)`.
fn event(line: &str) -> Option<Event<'_>> {
    let (head, _) = line.rsplit_once(": (")?;
    let (head, name) = head.rsplit_once(": ")?;
    let (head, at) = head.trim_end().rsplit_once(' ')?;
    let (seconds, micros) = at.split_once('.')?;
    let micros = micros.get(..6)?;
    let at_us = seconds.parse::<u64>().ok()? * 1_000_000 + micros.parse::<u64>().ok()?;
    // Drops the flags and the processor, which changes when a task moves.
    let (head, _) = head.trim_end().rsplit_once(' ')?;
    let (task, _) = head.trim_end().rsplit_once(" [")?;
    Some(Event { task: task.trim(), at_us, name: name.trim() })
}

/// Parses `# entries-in-buffer/entries-written: 140080/250280   #P:4`.
fn lost(line: &str) -> Option<u64> {
    let (kept, rest) =
        line.strip_prefix("# entries-in-buffer/entries-written: ")?.split_once('/')?;
    let written = rest.split_whitespace().next()?;
    Some(written.parse::<u64>().ok()?.saturating_sub(kept.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &str, took_us: f64, count: u32) -> Stage {
        Stage { name: name.to_owned(), took_us, count }
    }

    const BEGIN: &str = "# tracer: nop\n#\n# entries-in-buffer/entries-written: 4/4   #P:2\n#\n";

    #[test]
    fn interleaved_begins_and_ends_of_stages_are_paired_by_task() {
        let text = format!(
            "{BEGIN}     kworker/0:1-9       [000] d....     1.000100: in_onlining: \
             (online_pages+0x0/0x3d0)\n \
             my : (odd) [1] name-77      [001] d....     1.000200: in_onlining: \
             (online_pages+0x0/0x3d0)\n     \
             kworker/0:1-9       [001] d....     2.000100: out_onlining: \
             (memory_subsys_online+0x1c/0x60 <- online_pages)\n \
             my : (odd) [1] name-77      [001] d....     1.000250: out_onlining: \
             (x+0x1c/0x60 <- online_pages)\n"
        );
        let expected =
            Told { stages: vec![stage("onlining", 1_000_050.0, 2)], open: false, lost: 0 };
        assert_eq!(parse(&text), expected);
    }

    fn told(events: &[(u32, &str)]) -> Told {
        let lines = events
            .iter()
            .map(|(at, name)| format!(" a-1 [000] d.... 5.{at:06}: {name}: (f+0x0/0x1)\n"));
        parse(&lines.collect::<String>())
    }

    #[test]
    fn a_nested_stage_is_part_of_the_outer_one_and_of_the_total() {
        let told = told(&[
            (0, "in_guest_total"),
            (10, "in_section_clean_up"),
            (20, "in_page_table_destroy"),
            (30, "out_page_table_destroy"),
            (40, "out_section_clean_up"),
            (50, "in_page_table_destroy"),
            (70, "out_page_table_destroy"),
            (100, "out_guest_total"),
        ]);
        let expected = [
            stage("section_clean_up", 30.0, 1),
            stage("page_table_destroy", 20.0, 1),
            stage("guest_total", 100.0, 1),
        ];
        assert_eq!(told.stages, expected);
    }

    #[test]
    fn an_unpaired_end_counts_nothing_and_an_unpaired_begin_is_open() {
        let told = told(&[
            (0, "out_onlining"),
            (10, "in_guest_total"),
            (20, "in_onlining"),
            (30, "in_else"),
        ]);
        assert_eq!(told, Told { stages: Vec::new(), open: true, lost: 0 });
    }

    #[test]
    fn an_end_that_was_missed_leaves_nothing_open() {
        let told = told(&[
            (0, "in_guest_total"),
            (1, "in_onlining"),
            (9, "out_guest_total"),
            (10, "in_onlining"),
            (12, "out_onlining"),
        ]);
        assert_eq!((told.stages.len(), told.open), (2, false));
    }

    /// The trace of a guest with Debian's kernel 6.12. The guest grew by 132 MiB and 4 MiB, and
    /// shrank by 8 MiB and the rest.
    const DEBIAN: &str = include_str!("debian-6.12.txt");

    #[test]
    fn a_trace_of_a_resized_debian_guest_shows_every_stage() {
        let expected = vec![
            stage("page_table_build", 1661.0, 2),
            stage("section_init", 26_820.0, 2),
            stage("onlining", 13_734.0, 2),
            stage("offlining", 48_009.0, 2),
            stage("section_clean_up", 2155.0, 2),
            // The clean-up contains two more, of the memory map's own page tables.
            stage("page_table_destroy", 831.0, 2),
            stage("sub_block_onlining", 274.0, 1),
            stage("sub_block_offlining", 602_676.0, 5),
            stage("host_requests", 29_043.0, 8),
            stage("guest_total", 799_114.0, 6),
        ];
        assert_eq!(parse(DEBIAN), Told { stages: expected, open: false, lost: 0 });
    }

    #[test]
    fn a_trace_that_was_read_too_early_is_open_wherever_it_ends() {
        let lines: Vec<_> = DEBIAN.lines().collect();
        let ends_total = |line: &str| line.contains("out_guest_total") || line.starts_with('#');
        for end in 12..lines.len() {
            assert_eq!(
                parse(&lines[..end].join("\n")).open,
                !ends_total(lines[end - 1]),
                "{end} lines"
            );
        }
    }

    #[test]
    fn dropped_events_are_counted() {
        assert_eq!(
            parse("# entries-in-buffer/entries-written: 140080/250280   #P:4\n").lost,
            110_200
        );
    }
}
