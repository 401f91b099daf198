//! Runs on the CPU in processes that fork.
#![cfg(target_os = "linux")]

use hopper_attention::{
    DType, Device, Dims, ForwardArgs, ForwardProblem, Result, Stream, TensorMut, TensorRef, Workspace,
};

mod common;

use common::{dense, values};

/// Computes a problem of several tasks.
fn run() -> Result<Vec<f32>> {
    let problem = ForwardProblem::builder(DType::F32, Dims::new(2, 130, 2, 16)).build()?;
    let layout = dense(problem.q_shape());
    let (data, mut o) = (values(layout.span(), 1), vec![f32::NAN; layout.span()]);
    let input = || TensorRef::host(&data, layout);
    let args = ForwardArgs::new(input()?, input()?, input()?, TensorMut::host(&mut o, layout)?);
    problem.plan(&Device::cpu())?.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, 0)?, args)?;
    Ok(o)
}

/// Whether `call` returns true in a child process within 20 seconds.
fn in_a_child(call: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls `call`, which allocates and computes, and ends without running destructors. glibc keeps its
    // allocator usable in a child, and the tests of this file hold no lock that another test holds.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: the signal ends this process, whose one thread is this one.
            unsafe { libc::alarm(20) };
            let status = if call() { 0 } else { 1 };
            // SAFETY: ends this process.
            unsafe { libc::_exit(status) }
        }
        child => {
            assert!(child > 0, "{}", std::io::Error::last_os_error());
            let mut status = 0;
            // SAFETY: a child of this process, and a place for its status.
            let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(ended, child);
            status == 0
        }
    }
}

#[test]
fn a_child_computes_after_a_run_of_its_parent() {
    let want = run().unwrap();
    assert!(in_a_child(|| run().is_ok_and(|got| got == want)));
    // A child of a child, where both have computed.
    assert!(in_a_child(|| run().is_ok() && in_a_child(|| run().is_ok_and(|got| got == want))));
    // The parent goes on.
    assert_eq!(run().unwrap(), want);
}

#[test]
fn a_child_computes_while_its_parent_runs() {
    let want = run().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| (0..300).for_each(|_| assert_eq!(run().unwrap(), want)));
        for _ in 0..10 {
            assert!(in_a_child(|| run().is_ok_and(|got| got == want)));
        }
    });
}
