//! Tests of `aquifer region show-pages` and `drop`.

use super::framework::Setting;
use crate::common::{stderr, wait_until};

#[test]
fn it_is_known_where_each_page_is() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("known", &["--prefetch", "off"]);
    let mut program = setting.start(&region);
    program.does("write 1");
    drop(program);
    wait_until("no program maps the region", || {
        setting.show("known")["programs"].as_array().unwrap().is_empty()
    });
    let pages = |more: &[&str]| {
        let found = setting.done(&[&["region", "show-pages", "known"], more].concat());
        let mut states = Vec::new();
        for run in found["pages"].as_array().unwrap() {
            assert_eq!(run["first"].as_u64().unwrap(), states.len() as u64);
            states.resize(
                states.len() + run["count"].as_u64().unwrap() as usize,
                run["state"].clone(),
            );
        }
        (states, found["extents"].clone())
    };
    let (states, extents) = pages(&[]);
    let count = |of: &str| states.iter().filter(|state| *state == of).count() as u64 * 4096;
    let usage = setting.show("known")["usage"].clone();
    assert_eq!(
        (count("remote"), count("zero")),
        (usage["remote"].as_u64().unwrap(), usage["zero"].as_u64().unwrap())
    );
    assert_eq!(count("resident") + count("dirty"), usage["resident"].as_u64().unwrap());
    assert!(count("remote") > 20 << 20 && count("dirty") > 0, "{usage}");
    assert!(extents[0]["lease"]["lender"].is_string() && extents[0]["from"] == 0, "{extents}");

    setting.done(&["region", "drop", "known", "--first", "64", "--count", "100"]);
    let after = pages(&[]).0;
    let same = |range: std::ops::Range<usize>| after[range.clone()] == states[range];
    assert!(
        same(0..64)
            && same(164..states.len())
            && after[64..164].iter().all(|state| state == "zero")
    );
    let mut program = setting.start(&region);
    program.does("zero 64 100");
    let refused =
        setting.aquifer(&["region", "show-pages", "known", "--first", "9000", "--count", "1"]);
    assert!(stderr(&refused).contains("has 8192 pages"), "{}", stderr(&refused));
}
