# SPDX-License-Identifier: MIT
"""The mutants: which function of uvm_ext goes wrong and how (tests/c/mutation.py), and the test that must notice."""

import dataclasses
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
sys.path.append(str(TOP / "tests" / "c"))
from mutation import Fault, drop, never, replace, subject  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`faults` are (function, fault): both are on, or none. A fault of tokens that end in ; or } is of statements."""

    name: str
    what: str
    test: str  # program and case
    faults: tuple[tuple[str, Fault], ...]
    gpu: str = ""  # parameters of the simulated GPU

    def places(self):
        """Yield (file, start, end, fault, new): in each file of uvm_ext, `new` stands between the offsets."""
        for where, fault in self.faults:
            try:
                path, body = subject(f"uvm_ext/{where}", TOP)
                start, end, new = fault.span(body)
            except LookupError as error:
                raise LookupError(f"mutant {self.name}: {where}: {error}") from None
            yield path.name, start, end, fault, new


def _m(name, what, test, where, fault, gpu=""):
    return Mutant(name, what, test, ((where, fault),), gpu)


# fmt: off
MUTANTS = (
    # ---- invalidates, membars, page-table entries
    _m("no_invalidate", "no TLB invalidate follows the entries", "test_calls test_replace",
       "stage_invalidate", replace("if (!mask) continue;", "continue;")),
    _m("narrow_invalidate", "the invalidate omits the last granule of a run", "test_random",
       "stage_invalidate", replace("(__fls(mask) + 1)", "(__fls(mask) + (__fls(mask) == __ffs(mask)))")),
    _m("runs_merged_wrongly", "runs that are not adjacent are merged, and only the first is invalidated", "test_random",
       "uvm_vmem_push_invalidate_add",
       replace("push->pending_end + 1 == start && push->pending_huge == huge",
               "push->pending_huge == huge && (end = push->pending_end, 1)")),
    _m("huge_size_left_out", "an invalidate of 2 MiB entries names only the size 64 KiB",
       "test_calls test_huge_page_replaced_by_huge_page",
       "pending_flush", replace("push->pending_huge ? UVM_PAGE_SIZE_2M : 0", "0")),
    _m("no_membar", "no membar is issued before memory is freed", "test_lifetime test_late_write",
       "tables_write",
       replace("call->downgrade || overlay->former_map", "(call->downgrade = false, overlay->former_map)")),
    _m("entry_off_by_one", "the neighbouring entry is written", "test_calls test_map_overlay_rest_is_sparse",
       "entry_write", replace("(va - start) / UVM_VMEM_GRANULE", "((va - start) / UVM_VMEM_GRANULE) ^ 1")),
    _m("read_only", "pages are mapped read-only", "test_calls test_map_overlay_rest_is_sparse",
       "page_pte", replace("UVM_PROT_READ_WRITE_ATOMIC", "UVM_PROT_READ_ONLY")),
    _m("offset_ignored", "every granule of a page is mapped to the page's first",
       "test_random",
       "page_pte", replace("entry->granule", "0")),
    _m("no_backdrop", "unbacked entries of an overlay are invalid instead of sparse",
       "test_calls test_map_overlay_rest_is_sparse",
       "entry_pte", replace("call->tree->hal->make_sparse_pte()", "0")),
    _m("directory_not_written", "a cut 2 MiB entry is never replaced by its table",
       "test_calls test_huge_page_gets_one_entry",
       "stage_directories", drop("uvm_page_tree_write_pde")),
    _m("gathered_entries_not_counted", "room in a push is reserved without the entries that the PTE batch has gathered",
       "test_atomic test_largest_range",
       "entries_space", replace("push->ptes.pte_count * push->ptes.pte_entry_size + FLUSH_SPACE", "0")),
    _m("one_step", "a 2 MiB entry turns directly into a table", "test_live test_live_takeover",
       "overlay_needs_break", replace("overlay->cut", "false")),
    _m("not_ahead", "the next block is not opened before a kernel reads there",
       "test_live test_live_growth_over_a_backdrop",
       "op_prepare", never("UVM_VMEM_MAP_AHEAD")),
    _m("ahead_into_the_next_range", "MAP_AHEAD goes on in whatever range follows",
       "test_neighbour neighbour_stays",
       "open_ahead",
       replace("va > uvm_vmem_va_range(range)->node.end", "!(range = uvm_vmem_range_find(call->va_space, va))")),
    _m("ahead_into_other_memory", "MAP_AHEAD takes over any mapping of the range",
       "test_neighbour test_ahead_stays_with_its_memory",
       "open_ahead", replace("!uvm_vmem_same_origin(map, overlay->map)", "false")),
    _m("origin_unknown", "a part of a mapping is not known as one", "test_random",
       "overlay_take", drop("++call->space->last_origin")),
    _m("open_maps", "MAP_OPEN takes what is mapped for sparse", "test_random",
       "op_prepare", replace("overlay && !open", "overlay")),
    _m("no_membar_for_sparse", "no membar is issued when a sparse entry becomes a page",
       "test_calls test_sparse_goes_behind_a_membar",
       "granule_map", replace("call->replaces_sparse || !overlay->opened", "false")),
    # ---- checks
    _m("replace_unasked", "a mapped page is replaced without the flag", "test_errors test_err_map_elements",
       "piece_put", never("UVM_VMEM_MAP_REPLACE")),
    _m("page_end_unchecked", "an element may extend past the end of its page", "test_errors test_err_map_elements",
       "handle_find", never("(*handle)->granules")),
    _m("other_gpus_page", "a page of another GPU may be mapped", "test_calls test_two_gpus",
       "handle_find", replace("(*handle)->slab->owner != call->vgpu", "false"), gpu="gpus=2"),
    _m("range_end_unchecked", "an element may extend past its range", "test_errors test_err_map_elements",
       "range_find", replace("op->va + op->length - 1 > uvm_vmem_va_range(*range)->node.end", "false")),
    _m("gpu_reach_unchecked", "pages are mapped where the GPU cannot address them", "test_errors test_err_out_of_reach",
       "range_find", replace("uvm_gpu_can_address(call->gpu, op->va, op->length)", "true")),
    _m("half_a_batch", "a failed batch keeps the elements before the failure",
       "test_atomic test_largest_batch",
       "batch_change", replace("uvm_vmem_call_undo(call);", "(void)uvm_vmem_call_commit(call);")),
    _m("element_size_unchecked", "elements of another size are read as if they were of this one",
       "test_errors test_err_op_size",
       "uvm_vmem_check_batch", never("opSize")),
    _m("offset_overflow", "an offset past the largest page is accepted", "test_errors test_err_map_elements",
       "uvm_vmem_check_op",
       replace("op->offset >= UVM_VMEM_BLOCK || op->length > UVM_VMEM_BLOCK - op->offset", "false")),
    _m("limit_unchecked", "one call may touch any amount", "test_errors test_err_limits",
       "uvm_vmem_check_op", never("UVM_VMEM_MAX_BYTES - *total")),
    _m("flags_unchecked", "unknown flags of an element are ignored", "test_errors test_err_flags_and_reserved",
       "uvm_vmem_check_op", replace("op->flags & ~flags", "0")),
    _m("descriptor_unchecked", "any nvidia-uvm descriptor is accepted as an address space",
       "test_errors test_err_wrong_descriptor",
       "uvm_vmem_ioctl", replace("!uvm_fd_va_space(filp)", "false")),
    _m("overlays_charged_to_nobody", "overlays are not charged to the memory cgroup",
       "test_process test_overlays_are_charged_to_the_cgroup",
       "uvm_vmem_space.h:uvm_vmem_zalloc", replace("NV_UVM_GFP_FLAGS_ACCOUNT", "NV_UVM_GFP_FLAGS")),
    _m("new_words_ignored", "words that the module does not know are taken for zero",
       "test_errors test_err_structure_size",
       "zeros_follow", never("memchr_inv")),
    _m("short_structure", "a structure of any size is accepted", "test_errors test_err_structure_size",
       "params_copy", never("min_size")),
    _m("answer_not_tried", "a call whose answer cannot be written is made", "test_errors test_err_structure_unreadable",
       "uvm_vmem_ioctl", replace("copy_to_user((void __user *)arg, params, known)", "false", n=1)),
    _m("pages_without_a_name", "CREATE keeps pages whose handles it could not tell",
       "test_errors test_err_answer_taken_away",
       "uvm_vmem_api_create_end", never("!told")),
    _m("elements_read_again", "elements are read again after they were checked",
       "test_inputs test_elements_are_read_once",
       "ops_copy",
       replace("*out_ops = ops;",
               "if (copy_from_user(ops, from, p->count * sizeof(*ops))) p->out_failed = 0; *out_ops = ops;")),
    _m("size_read_again", "the answer is as long as the size that was read with the rest", "test_inputs",
       "uvm_vmem_ioctl",
       replace("copy_to_user((void __user *)arg, params, known)",
               "copy_to_user((void __user *)arg, params, min_t(__u32, head->size, MAX_PARAMS))", n=2)),
    # ---- memory
    _m("fresh_memory_not_zeroed", "memory that another process used is handed out unzeroed",
       "test_lifetime test_memory_of_a_dead_process",
       "slabs_alloc", replace("chunks[i]->is_zero ? 0 : ~0U", "0")),
    _m("reused_memory_not_zeroed", "memory of a released page is handed out unzeroed",
       "test_lifetime test_released_page_comes_back_zeroed",
       "pages_zero", drop("|=")),
    _m("zeroed_short", "the last 4 KiB are not zeroed", "test_calls test_fresh_pages_read_as_zero",
       "granules_zero", replace("granules_size(count)", "granules_size(count) - 4096")),
    _m("leaked_slab", "a slab is never freed", "test_errors test_err_out_of_memory",
       "slab_free", drop("uvm_pmm_gpu_free")),
    _m("held_not_reduced", "freed slabs still count", "test_calls test_slabs_are_shared_and_given_back",
       "slab_free", drop("bytes_held")),
    _m("page_handed_out_twice", "a taken page counts as free", "test_calls test_pages_of_a_create_do_not_overlap",
       "pages_take_from", drop("|=")),
    _m("lost_unwind", "a failed CREATE keeps the slabs that it allocated", "test_errors test_err_out_of_memory",
       "create_unwind", drop("slab_free")),
    _m("handles_used_again", "a handle is reused for another page", "test_calls test_handles_are_never_used_twice",
       "create_run", drop("next_handle")),
    Mutant("missing_lock", "CREATE does not take the file's lock", "test_race test_concurrent_calls",
           (("pages_create", drop("mutex_lock")), ("pages_create", drop("mutex_unlock")))),
    _m("no_wait", "calls return, and RELEASE frees pages, before the GPU has processed the entries", "test_random",
       "call_step", replace("uvm_vmem_push_wait(&call->push)", "NV_OK")),
    _m("released_but_mapped", "RELEASE leaves the last entry of a page mapped",
       "test_calls test_alias_one_page_at_many_addresses",
       "handle_unmap",
       replace("uvm_vmem_entry_unmap(call, overlay, entry->index, false);",
               "uvm_vmem_entry_clear(overlay, entry->index);")),
    _m("double_release", "RELEASE accepts the same handle twice", "test_errors test_err_release",
       "handles_claim", replace("handle->hidden = true;", "handle->hidden = i > 1;")),
    _m("claim_not_given_up", "a failed RELEASE keeps the handles that it claimed", "test_errors test_err_release",
       "handles_claim",
       replace("uvm_vmem_handle_find_hidden(call->space, r->ids[--i])->hidden = false;", "i--;")),
    _m("release_in_one_step", "RELEASE holds the lock for any amount of work", "test_release test_release_in_steps",
       "handle_unmap", drop("-=")),
    _m("large_mapping_taken", "blocks of a mapping of any size are taken over",
       "test_errors test_err_takeover_of_a_large_mapping",
       "map_can_be_taken", never("UVM_VMEM_TAKE_TABLES")),
    _m("handles_copied_under_a_lock", "RELEASE copies its handles under the lock that other RELEASEs wait for",
       "test_release test_release_that_waits_for_its_handles",
       "uvm_vmem_api_release", replace("ids && !ids_copy(ids, p)", "(uvm_vmem_free(ids), ids = NULL, false)")),
    _m("reserved_word_ignored", "QUERY does not look at its last reserved word",
       "test_errors test_err_flags_and_reserved",
       "uvm_vmem_check_query", replace("COUNT(p->reserved)", "COUNT(p->reserved) - 1")),
    # ---- ends of life
    _m("unfinished_mapping_taken_for_an_overlay", "a memory handle without an RM object makes a mapping vMem's",
       "test_stock test_refused_mappings",
       "uvm_vmem_closed",
       replace("map->vmem",
               "map->vmem || !map->mem_handle || map->mem_handle->rm_handle\n"
               "? map->vmem : *(struct uvm_vmem_overlay **)(map->mem_handle + 1)"), gpu="gpus=2"),
    _m("table_of_a_failed_call_lost", "a table that a failed call left is not freed with its mapping",
       "test_failnth test_every_allocation",
       "uvm_vmem_closed", never("overlay->table.table")),
    _m("table_of_a_failed_call_twice", "a table that a failed call left is freed again after its use",
       "test_failnth test_every_allocation",
       "overlay_settle", drop("memset")),
    _m("freed_under_the_gpu", "a CREATE that the GPU does not answer frees what the GPU may still write to",
       "test_fatal in_create_",
       "create_unwind",
       replace("uvm_tracker_wait(&c->tracker) == NV_OK && uvm_global_get_status() == NV_OK",
               "(uvm_tracker_wait(&c->tracker), true)")),
    _m("undone_takeover_stays_marked", "a mapping whose takeover is undone still names the overlay",
       "test_stock test_takeover_that_is_undone",
       "uvm_vmem_overlay_undo", drop("map->vmem")),
    _m("overlay_cut", "UVM's own calls may cut an overlay", "test_release test_release_after_uvm_closed_overlays",
       "uvm_vmem_is_overlay", replace("uvm_vmem_overlay_of(ext_gpu_map) != NULL", "false")),
    _m("closing_unnoticed", "the records of an overlay that UVM has closed stay",
       "test_random",
       "uvm_vmem_closed", drop("overlay_drop")),
    _m("leaked_overlay", "an overlay is never freed", "test_process test_overlays_are_charged_to_the_cgroup",
       "overlay_drop", drop("uvm_vmem_free")),
    _m("lost_unwind_of_an_overlay", "an overlay opened for a failed batch stays registered with UVM", "test_failnth",
       "uvm_vmem_overlay_undo", drop("map_destroy")),
    _m("gpu_leaves_its_pages", "unregistering a GPU frees none of its pages",
       "test_lifetime test_unregister_gpu_ends_its_handles",
       "uvm_vmem_unregister_gpu", drop("uvm_vmem_memory_free_all")),
    _m("gpu_takes_others_pages", "unregistering a GPU also frees another GPU's pages", "test_calls test_two_gpus",
       "uvm_vmem_memory_free_all", never("owner"), gpu="gpus=2"),
)
# fmt: on
