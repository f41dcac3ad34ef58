//! Tests of programs with memory in a region.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::framework::{HEAP_PROGRAM, Setting, compile, kill};
use crate::common::{stderr, stdout, wait_until};

#[test]
fn an_unmodified_program_has_its_memory_in_the_pool() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("one", &[]);
    let mut program = setting.start(&region);
    program.does("write 1");
    program.does("check 1");
    let status = setting.show("one");
    let bytes = |of: &str| status["usage"][of].as_u64().unwrap();
    assert!(bytes("resident") <= 8 << 20 && bytes("remote") > 20 << 20, "{status}");
    assert!(status["programs"][0].as_str().unwrap().starts_with("python3"), "{status}");
    assert!(status["counts"]["remote_faults"].as_u64().unwrap() > 1000, "{status}");

    // A region in use must not be removed.
    let refused = setting.aquifer(&["region", "rm", "one"]);
    assert!(
        !refused.status.success() && stderr(&refused).contains("in use by python3"),
        "{}",
        stderr(&refused)
    );

    // The limit changes while the region is in use.
    setting.done(&["region", "resize", "one", "--cache", "4M"]);
    assert!(setting.show("one")["usage"]["resident"].as_u64().unwrap() <= 4 << 20);
    program.does("check 1");

    // The program's holes read as zeroes.
    program.does("punch 100 5000");
    program.does("zero 100 5000");
    // Children would read zeroes, so they see no region.
    program.does("fork");

    // A disk reads into pages that are evicted in the meantime.
    program.does("direct 3");
    program.does("check 3");

    // The content of a region outlives the program.
    program.does("write 2");
    kill(&Value::from(program.child.id()));
    drop(program);
    let mut program = setting.start(&region);
    program.does("check 2");
    drop(program);
    setting.remove("one");
    wait_until("the tmpfs is gone", || setting.mounts() == 0);
    wait_until("the lender's memory is free", || {
        let files = fs::read_dir(setting.lender.pages())
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap());
        files.map(|file| std::os::unix::fs::MetadataExt::blocks(&file) * 512).sum::<u64>() < 1 << 20
    });
}

#[test]
fn a_program_can_allocate_its_memory_in_a_region() {
    let Some(setting) = Setting::new() else { return };
    setting.create("heap", &[]);
    setting.done(&["region", "resize", "heap", "--cache", "4M"]);
    let words = ["--heap", "heap", "--", "/usr/bin/python3", "-c", HEAP_PROGRAM];
    for _ in 0..2 {
        let mut program = setting.exec(&words);
        ["fill", "check"].iter().for_each(|order| program.does(order));
        let status = setting.show("heap");
        assert!(status["usage"]["remote"].as_u64().unwrap() > 8 << 20, "{status}");

        kill(&status["pid"]);
        ["check", "free", "check", "child", "fork", "check"]
            .iter()
            .for_each(|order| program.does(order));

        let second = setting.aquifer(&["region", "exec", "--heap", "heap", "--", "true"]);
        assert!(stderr(&second).contains("in use by python3"), "{}", stderr(&second));
        drop(program);
        wait_until("no program maps the region", || {
            setting.show("heap")["programs"].as_array().unwrap().is_empty()
        });
    }
}

#[test]
fn a_program_in_c_uses_a_region_by_the_library() {
    let Some(setting) = Setting::new() else { return };
    let region = setting.create("c", &[]);
    let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../libaquifer");
    let program = setting.dir.path().join("pages");
    compile(&capi.join("examples/pages.c"), &program);

    let output = Command::new(&program).arg(&region).output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let said = stdout(&output);
    let words: Vec<_> = said.split_whitespace().collect();
    let number = |of: &str| {
        words[words.iter().position(|word| *word == of).unwrap() + 1].parse::<u64>().unwrap()
    };
    let pages = ["zero", "remote", "resident", "dirty"].map(number);
    assert_eq!((pages.iter().sum::<u64>(), pages[0]), (8192, 2048), "{said}");
    assert_eq!((number("cache"), pages[3]), (4 << 20, 0), "{said}");
    assert!(pages[2] <= 1024 && pages[1] > 5000 && said.contains("at unix:"), "{said}");

    let refused =
        Command::new(&program).arg(setting.dir.path().join("regions/none")).output().unwrap();
    assert!(
        stderr(&refused).contains("mapping the region: there is no region 'none'"),
        "{}",
        stderr(&refused)
    );
}
