//! Tests of cache limits that regions share, of refusals, and of emulated links.

use std::fs;
use std::path::Path;

use super::framework::{Setting, kill};
use crate::common::{aquifer, stderr, wait_until};

#[test]
fn caches_share_a_limit_by_their_needs() {
    let Some(setting) = Setting::new() else { return };
    setting.done(&["region", "set-limit", "--cache", "12M"]);
    let another = setting.another_lender();
    let one = setting.create("one", &["--group", "blue"]);
    let two = setting.create_over(&another, "two", &["--group", "blue"]);
    let cache = |name: &str| setting.show(name)["usage"]["cache"].as_u64().unwrap() >> 20;
    // The first region has its whole cache, the second the rest of the limit.
    assert_eq!((cache("one"), cache("two")), (8, 4));

    let mut programs = [setting.start(&one), setting.start(&two)];
    programs[0].does("write 1");
    for busy in [1, 0, 1] {
        let name = ["one", "two"][busy];
        programs[busy].does("write 1");
        wait_until("the busy region has most of the limit", || {
            programs[busy].does("check 1");
            let (caches, limits) =
                ([cache("one"), cache("two")], setting.done(&["region", "show-limits"]));
            let quotas =
                ["one", "two"].map(|name| limits["quotas"][name]["bytes"].as_u64().unwrap());
            assert!(quotas.iter().sum::<u64>() <= 12 << 20, "{limits}");
            caches[busy] >= 7 && caches[1 - busy] < 5
        });
        // The next engine keeps the dead one's quota.
        kill(&setting.show(name)["pid"]);
        programs[busy].does("check 1");
        assert!(cache(name) >= 7);
    }
    programs[0].does("check 1");

    setting.done(&["region", "set-limit", "--group", "blue", "--cache", "6M"]);
    assert!(cache("one") + cache("two") <= 6);
    let resident = |name: &str| setting.show(name)["usage"]["resident"].as_u64().unwrap();
    assert!(resident("one") + resident("two") <= 6 << 20);
    programs.iter_mut().for_each(|program| program.does("check 1"));
    let refused = setting.aquifer(&["region", "set-limit", "--group", "blue", "--cache", "400K"]);
    assert!(stderr(&refused).contains("2 regions need at least 256KiB"), "{}", stderr(&refused));

    setting.done(&["region", "set-limit", "--cache", "none"]);
    setting.done(&["region", "set-limit", "--group", "blue", "--cache", "none"]);
    assert_eq!((cache("one"), cache("two")), (8, 8));
    programs.iter_mut().for_each(|program| program.does("check 1"));
}

#[test]
fn impossible_regions_are_refused_with_the_reason() {
    let Some(setting) = Setting::new() else { return };
    let uri = setting.lender.uri().to_owned();
    let says = |words: &[&str], what: &str| {
        let output = setting.aquifer(words);
        assert!(
            !output.status.success() && stderr(&output).contains(what),
            "{words:?}: {}",
            stderr(&output)
        );
    };
    let create = |name: &'static str, size: &'static str| {
        ["region", "create", name, "--size", size, "--cache", "4M", "--lender"]
    };
    says(&[&create("big", "1G")[..], &[&uri]].concat(), "less than its size");
    says(&[&create("../x", "16M")[..], &[&uri]].concat(), "cannot be a region name");
    says(&[&create("away", "16M")[..], &["nbd+unix:///?socket=/nowhere"]].concat(), "/nowhere");
    says(&["region", "show", "none"], "there is no region 'none'");
    setting.create("twice", &[]);
    says(&[&create("twice", "16M")[..], &[&uri]].concat(), "a region 'twice' already exists");
    // Without the shim a program reads absent pages of the file as zeroes, so only root may open
    // it.
    let mode = fs::metadata(setting.dir.path().join("regions")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o700);
    // A private mapping would read zeroes.
    let region = setting.dir.path().join("regions/twice");
    let output = aquifer(setting.dir.path())
        .args(["region", "exec", "--", "python3", "-c"])
        .arg("import mmap,os,sys; mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0, mmap.MAP_PRIVATE)")
        .arg(&region)
        .output()
        .unwrap();
    assert!(
        !output.status.success() && stderr(&output).contains("mapped shared"),
        "{}",
        stderr(&output)
    );
    setting.remove("twice");
}

#[test]
fn an_emulated_link_takes_its_time_and_needs_no_lender() {
    let Some(setting) = Setting::new() else { return };
    let words = [
        "region",
        "create",
        "what-if",
        "--size",
        "32M",
        "--cache",
        "8M",
        "--emulate-link",
        "200us",
    ];
    let created = setting.done(&words);
    let mut program = setting.start(Path::new(created["file"].as_str().unwrap()));
    program.does("write 7");
    program.does("check 7");
    let status = setting.show("what-if");
    let median = status["latency"]["p50_us"].as_f64().unwrap();
    assert!(median >= 198.0, "{status}");
    // The engine's pages are lost with it, and no program may read zeroes instead.
    kill(&status["pid"]);
    wait_until("no engine serves the region", || {
        !setting.aquifer(&["region", "show", "what-if"]).status.success()
    });
    drop(program);
    setting.done(&["region", "rm", "what-if"]);
}
